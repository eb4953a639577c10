"""Calls of the network before the first step, such as to choose inducing points in ``configure_optimizers``."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import WIDTH, Trained, batches


class Module(Trained):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))

    @torch.no_grad()
    def look(self, at: str) -> None:
        if at == self.at:
            self.scale = float(self(torch.ones(2, WIDTH)).abs().mean() + self.embed(torch.ones(2, WIDTH)).mean())

    def loss(self, batch: Tensor) -> Tensor:
        return F.mse_loss(self(batch) * self.scale, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.look("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self) -> None:
        self.look("on_fit_start")

    def on_train_start(self) -> None:
        self.look("on_train_start")


@pytest.mark.parametrize("at", ["configure_optimizers", "on_train_start"])
def test_the_network_may_be_called_on_data_ranks(at: str) -> None:
    assert_trains_alike(partial(Module, at), batches, "dp2")
