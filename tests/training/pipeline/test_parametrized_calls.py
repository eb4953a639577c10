"""A forward that parametrizes a weight and undoes it, as peft's LoRA of parameters (``target_parameters``) does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_shard.testing import assert_trains_alike


class Plus(nn.Module):
    def __init__(self, change: Tensor) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change


class Adapted(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8).requires_grad_(trains)
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 2))

    @contextmanager
    def adapted(self) -> Iterator[None]:
        trains = self.layer.weight.requires_grad
        parametrize.register_parametrization(self.layer, "weight", Plus(self.b @ self.a))
        self.layer.parametrizations.weight.original.requires_grad_(trains)  # type: ignore[union-attr]
        try:
            yield
        finally:
            parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        with self.adapted():
            return x + self.layer(x).tanh()


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(trains=bool(place % 2)) for place in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.01)


def batches() -> list[Tensor]:
    return list(torch.linspace(-3, 3, 3 * 8 * 8).sin().view(3, 8, 8))


def test_weights_that_a_forward_parametrizes_and_puts_back_train_alike() -> None:
    assert_trains_alike(Net, batches, "pp2")
