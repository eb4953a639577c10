"""Metrics that a LightningModule makes before its blocks, and updates after them in evaluations only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_shard.testing import assert_trains_alike

WIDTH = 8
KINDS: dict[str, Callable[[], nn.Module]] = {
    "metric": MeanAbsoluteError,
    "collection": lambda: MetricCollection([MeanAbsoluteError(), MeanSquaredError()]),
    "list": lambda: nn.ModuleList([MeanAbsoluteError(), MeanSquaredError()]),
    "dict": lambda: nn.ModuleDict({"a": MeanAbsoluteError(), "b": MetricCollection([MeanSquaredError()])}),
}


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.measures = KINDS[kind]()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch.roll(1, -1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        predicted = self(batch)
        single = isinstance(self.measures, (MeanAbsoluteError, MetricCollection))
        measures = {"all": self.measures} if single else dict(self.measures.named_children())
        for name, measure in measures.items():
            measure.update(predicted, batch.roll(1, -1))
            logged = {name: measure} if not isinstance(measure, MetricCollection) else measure
            self.log_dict(logged)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_are_as_in_one_process(kind: str) -> None:
    assert_trains_alike(partial(Module, kind), batches, ["pp2 x dp2"])
