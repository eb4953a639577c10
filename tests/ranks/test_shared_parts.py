"""Modules that all blocks are given and call, and that the network registers too, such as a rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.testing import assert_trains_alike

WIDTH = 8


class Rotary(nn.Module):
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


SHARED: dict[str, Callable[[], nn.Module]] = {
    "rotary": Rotary,
    "layer": lambda: nn.Linear(WIDTH, WIDTH),
    "dropout": lambda: nn.Dropout(0.0),
}


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.shared(x)).tanh()


class Network(nn.Module):
    def __init__(self, kind: str, hooked: bool) -> None:
        super().__init__()
        self.shared = SHARED[kind]()
        self.blocks = nn.ModuleList(Block(self.shared) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []
        if hooked:
            self.shared.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for block in self.blocks:
            x = block(x)
        return self.head(x + sum(self.seen))


class Module(L.LightningModule):
    def __init__(self, kind: str, hooked: bool) -> None:
        super().__init__()
        self.network = Network(kind, hooked)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch), batch.roll(1, -1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("hooked", [False, True], ids=["", "with a hook"])
@pytest.mark.parametrize("kind", SHARED)
def test_trains_as_in_one_process(kind: str, hooked: bool) -> None:
    interleaved = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}
    assert_trains_alike(partial(Module, kind, hooked), batches, ["pp2", "pp4", interleaved])
