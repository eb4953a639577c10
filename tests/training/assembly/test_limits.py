"""What of Lightning is refused or warned of at setup, or in the first step of a kind."""

from __future__ import annotations

import copy
import warnings

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torchmetrics import RunningMean

from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.limits import refuse


def test_gradients_scaled_by_frequency_in_a_microbatch_are_warned_of() -> None:
    module = L.LightningModule()
    module.words = nn.Embedding(8, 2, scale_grad_by_freq=True)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.warns(UserWarning, match=r"words divides gradients .*\(scale_grad_by_freq\)"):
        refuse(trainer, module, Layout(pipeline_parallel_size=2), 4)


@pytest.mark.parametrize("table", [nn.Embedding(8, 2, sparse=True), nn.EmbeddingBag(8, 2, sparse=True, mode="sum")])
@pytest.mark.parametrize("layout", [Layout(), Layout(data_parallel_size=2), Layout(pipeline_parallel_size=2)])
def test_tables_with_sparse_gradients_are_refused_if_they_train(table: nn.Embedding, layout: Layout) -> None:
    """FSDP2 failed in the first backward, by the name of an operation of its own."""
    module = L.LightningModule()
    module.words = copy.deepcopy(table)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.FITTING
    with pytest.raises(ConfigurationError, match=r"words, a table with sparse=True.* use sparse=False"):
        refuse(trainer, module, layout, 1)
    trainer.state.fn = TrainerFn.VALIDATING
    refuse(trainer, module, layout, 1)
    trainer.state.fn = TrainerFn.FITTING
    module.words.requires_grad_(False)
    refuse(trainer, module, layout, 1)


def test_metrics_over_the_last_updates_are_warned_of() -> None:
    module = L.LightningModule()
    module.recent = RunningMean(window=3)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.state.fn = TrainerFn.VALIDATING
    with pytest.warns(UserWarning, match=r"recent is a metric over its last updates.* multiply its window by 4"):
        refuse(trainer, module, Layout(pipeline_parallel_size=2), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse(trainer, module, Layout(pipeline_parallel_size=2), 1)
