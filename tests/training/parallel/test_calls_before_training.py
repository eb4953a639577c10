"""Calls of the network before the first step, such as to choose inducing points in ``configure_optimizers``."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import random_batches

WIDTH = 8


class Module(L.LightningModule):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

    @torch.no_grad()
    def look(self, at: str) -> None:
        if at == self.at:
            self.scale = float(self(torch.ones(2, WIDTH)).abs().mean() + self.embed(torch.ones(2, WIDTH)).mean())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch) * self.scale, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.look("configure_optimizers")
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_fit_start(self) -> None:
        self.look("on_fit_start")

    def on_train_start(self) -> None:
        self.look("on_train_start")


batches = partial(random_batches, 8, WIDTH)


@pytest.mark.parametrize("at", ["configure_optimizers", "on_train_start"])
def test_the_network_may_be_called_on_data_ranks(at: str) -> None:
    assert_trains_alike(partial(Module, at), batches, "dp2")
