"""Means over an epoch's steps that a module's metrics take, where the last batch is smaller."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.habits.harness import Block, Net


class Module(L.LightningModule):
    """As templates of Lightning projects do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks = nn.ModuleList(Block() for _ in range(4))
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.train_loss(loss)
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        self.val_loss.update(loss)
        self.log("val_loss", self.val_loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(settings: dict[str, Any] | None) -> dict[str, float]:
    L.seed_everything(3, verbose=False)
    x = torch.randn(29, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader([*zip(x, 3 * x[:, :2])], batch_size=8)
    devices = 1 if settings is None else 2
    trainer = trainer_of(settings, devices, max_steps=-1, max_epochs=2)
    trainer.fit(Module(), loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_a_smaller_batch_counts_as_in_one_process() -> None:
    (expected,) = run_ranks(fit, 1, None, init=False)
    for found in run_ranks(fit, 2, {"pipeline_parallel_size": 2}, elastic=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
