"""Metrics that a LightningModule makes before its blocks, and updates after them in evaluations only."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_shard.testing import assert_trains_alike

WIDTH = 8


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.measure = MeanAbsoluteError()
        self.collection = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])
        self.listed = nn.ModuleList([MeanAbsoluteError()])
        self.named = nn.ModuleDict({"a": MeanAbsoluteError(), "b": MetricCollection([MeanSquaredError()], prefix="b_")})
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch.roll(1, -1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        predicted = self(batch)
        for place, measure in enumerate((self.measure, *self.listed, self.named["a"])):
            measure.update(predicted, batch.roll(1, -1))
            self.log(f"measure {place}", measure)  # type: ignore[arg-type]
        for collection in (self.collection, self.named["b"]):
            collection.update(predicted, batch.roll(1, -1))
            self.log_dict(collection)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


def test_metrics_are_as_in_one_process() -> None:
    assert_trains_alike(Module, batches, "pp2 x dp2")
