"""State that blocks keep, read by hooks on all stages: metrics in blocks, and statistics of normalisation layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import WIDTH, Layer, Trained


class Measured(Layer):
    """Keeps how large its outputs are, as routers keep their load."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.size.update(y.detach().abs().mean())
        return y


class Module(Trained):
    block = Measured

    def on_train_epoch_end(self) -> None:
        for block in self.blocks:
            block.size.compute()


class Normed(Trained):
    """Of a block on another stage it read the first values: BatchNorm doesn't change their versions."""

    block = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))

    def on_train_epoch_end(self) -> None:
        for block in self.blocks:
            float(block[1].running_var.mean())


def fit(kind: type[Trained], **options: Any) -> None:
    data = DataLoader(torch.randn(32, WIDTH), batch_size=16)
    trainer_of({"pipeline_parallel_size": 2, **options}, max_epochs=2).fit(kind(), data)


def test_a_metric_in_a_block_counts_its_own_stages_calls_and_is_refused_between_steps() -> None:
    with pytest.raises(RanksFailed, match=r"blocks\.0\.size is a metric in a block, .*Sentence 6 "):
        run_ranks(fit, 2, Module, elastic=True)


def test_statistics_of_another_stages_blocks_are_refused_in_hooks() -> None:
    with pytest.raises(RanksFailed, match=r"A hook asks for what blocks\.0 keeps as running_var.*a checkpoint has"):
        run_ranks(fit, 2, Normed, schedule="Interleaved1F1B", elastic=True)
