"""Batches of other lengths on other data ranks: pipelines that search for what crosses at different times."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET

WIDTH = 16


class Texts(Dataset[Tensor]):
    """Of 3 to 7 tokens."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3 + index * 7 % 5,), index)


def padded(texts: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


class Model(L.LightningModule):
    """The mean over the embedded text crosses to all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(Texts()), WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, len(Texts()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embed(batch)
        text = hidden.mean(1, keepdim=True)
        for block in self.blocks:
            hidden = hidden + block(hidden) + text
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(settings: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    L.seed_everything(1)
    strategy = HybridShardStrategy(pipeline_parallel_size=2, microbatches=2, **settings)
    trainer = L.Trainer(strategy=strategy, devices=4, max_epochs=2, **QUIET)
    module = Model()
    loader = DataLoader(Texts(), batch_size=4, collate_fn=padded)
    trainer.fit(module, loader, loader)
    return float(trainer.callback_metrics["val_loss"]), trainer.strategy.gather_full_parameters()  # type: ignore[attr-defined]


@pytest.mark.parametrize("settings", [{}, {"reduce_each_microbatch": True}, {"schedule": "Interleaved1F1B"}])
def test_blocks_freed_after_each_forward_are_gathered_alike_on_all_data_ranks(settings: dict[str, Any]) -> None:
    loss, kept = run_ranks(fit, 4, {}, elastic=True)[0]
    other, freed = run_ranks(fit, 4, {**settings, "reshard_after_forward": True}, elastic=True)[0]
    assert other == pytest.approx(loss, rel=1e-5)
    assert kept.keys() == freed.keys()
    for name, parameter in kept.items():
        torch.testing.assert_close(freed[name], parameter, rtol=0, atol=1e-6, msg=name)
