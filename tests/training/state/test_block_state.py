"""State that blocks keep, read by hooks on all stages: metrics in blocks, and statistics of normalisation layers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET

WIDTH = 8


class Measured(nn.Linear):
    """Keeps how large its outputs are, as routers keep their load."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.size = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).tanh()
        self.size.update(y.detach().abs().mean())
        return x + y


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block() for _ in range(4))

    def block(self) -> nn.Module:
        return Measured()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch[0].roll(1, -1))

    def on_train_epoch_end(self) -> None:
        for layer in self.layers:
            layer.size.compute()  # type: ignore[union-attr, operator]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Normed(Module):
    """Of a block on another stage it read the first values: BatchNorm doesn't change their versions."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def on_train_epoch_end(self) -> None:
        for layer in self.layers:
            float(layer[1].running_var.mean())  # type: ignore[index]


def fit(kind: type[Module], **options: Any) -> None:
    strategy = HybridShardStrategy(pipeline_parallel_size=2, **options)
    data = DataLoader(TensorDataset(torch.randn(32, WIDTH)), batch_size=16)
    L.Trainer(max_epochs=2, devices=2, strategy=strategy, **QUIET).fit(kind(), data)


def test_a_metric_in_a_block_counts_its_own_stages_calls_and_is_refused_between_steps() -> None:
    with pytest.raises(RanksFailed, match=r"layers\.0\.size is a metric in a block, .*Sentence 6 "):
        run_ranks(fit, 2, Module, elastic=True)


def test_statistics_of_another_stages_blocks_are_refused_in_hooks() -> None:
    with pytest.raises(RanksFailed, match=r"A hook asks for what layers\.0 keeps as running_var.*a checkpoint has"):
        run_ranks(fit, 2, Normed, schedule="Interleaved1F1B", elastic=True)
