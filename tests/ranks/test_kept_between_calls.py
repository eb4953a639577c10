"""Evaluation steps that call the network twice, and use between the calls what it keeps as attributes."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike

WIDTH = 8
INTERLEAVED = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}


class Keeps(nn.Module):
    """A layer that keeps what it is given, in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first: Tensor | None = None
        self.mean = 0.0
        self.means: list[Tensor] = []
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.first = x[0]
            self.mean = float(x.mean())
            self.means.append(x.mean())
            self.largest.copy_(x.max())
        return x + torch.tanh(self.linear(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Keeps()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self.head = Keeps()
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        if not self.training:
            self.features = {"last": x.mean(0)}
        y: Tensor = self.head(x)
        return y


class Module(L.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = Network()
        self.name = name

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch), 2 * batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        y = self.net(batch)
        if self.name == "net":
            bias = self.net.features["last"]
        else:
            layer: Any = self.get_submodule(self.name)
            largest = layer.largest
            bias = layer.first + layer.mean + layer.means[-1]
        z = self.net(batch + bias)
        self.log("difference", F.mse_loss(y, z))
        if self.name != "net":
            self.log("largest", largest)  # of the second call: the buffer was written in place

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=made) for _ in range(2)]


@pytest.mark.parametrize("name", ["blocks.0", "blocks.3", "embed", "head"])
def test_of_one_stage(name: str) -> None:
    layouts = ["pp2", INTERLEAVED] if name == "blocks.3" else ["pp2"]
    assert_trains_alike(partial(Module, f"net.{name}"), batches, layouts=layouts, steps=2)


def test_around_all_blocks() -> None:
    assert_trains_alike(partial(Module, "net"), batches, layouts=["pp2"], steps=2)
