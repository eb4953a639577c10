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


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("blocks.0", "embed", "head")]


@pytest.mark.parametrize("name", ["blocks.3", *LONG])
def test_of_one_stage(name: str) -> None:
    layouts = ["pp2", INTERLEAVED] if name == "blocks.3" else ["pp2"]
    assert_trains_alike(partial(Module, f"net.{name}"), batches, layouts=layouts, steps=2)


def test_around_all_blocks() -> None:
    assert_trains_alike(partial(Module, "net"), batches, layouts=["pp2"], steps=2)


class Fills(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.index = index

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        y = self.linear(x)
        if isinstance(losses, list):
            losses.append(y.square().mean())
        else:
            if "sum" in losses:
                losses["sum"] = losses["sum"] + y.square().mean()
                losses["number"] += 1
            losses[self.index] = y.square().mean()
        return x + torch.tanh(y)


class FillingNetwork(nn.Module):
    def __init__(self, losses: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fills(index) for index in range(4))
        self.fresh = losses

    def forward(self, x: Tensor, losses: Any = None) -> tuple[Tensor, Any]:
        losses = self.fresh.copy() if losses is None else losses
        for block in self.blocks:
            x = block(x, losses)
        return x, losses


class Filling(L.LightningModule):
    def __init__(self, losses: Any) -> None:
        super().__init__()
        self.net = FillingNetwork(losses)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y, losses = self.net(batch)
        given = losses if isinstance(losses, list) else list(losses.values())
        return F.mse_loss(y, 2 * batch) + 0.1 * sum(given)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        y, losses = self.net(batch)
        z, _ = self.net(y)
        self.log("difference", F.mse_loss(y, z))
        self.log("number", float(len(losses)))
        self.log("sum", sum(losses if isinstance(losses, list) else losses.values()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("losses", [pytest.param([], marks=pytest.mark.long), {"sum": 0.0, "number": 0}], ids=str)
def test_what_blocks_add_to_what_the_network_makes_is_alike(losses: Any) -> None:
    """Each stage had what its own blocks add, and a dict that the network returns hung the ranks."""
    assert_trains_alike(partial(Filling, losses), batches, ["pp2", INTERLEAVED])


class GivesToBlocks(Filling):
    """Gives the network what its blocks add to, in both calls."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        losses = self.net.fresh.copy()
        y, _ = self.net(batch, losses)
        z, _ = self.net(y, losses)
        self.log("difference", F.mse_loss(y, z))
        self.log("number", float(len(losses)))


@pytest.mark.parametrize("losses", [[], {"sum": 0.0, "number": 0}, pytest.param({}, marks=pytest.mark.long)], ids=str)
def test_what_blocks_of_several_stages_add_to_what_the_network_is_given_is_alike(losses: Any) -> None:
    assert_trains_alike(partial(GivesToBlocks, losses), batches, ["pp2", INTERLEAVED])


class IsTheNetwork(L.LightningModule):
    """Keeps its features itself, in a private attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps() for _ in range(4))
        self._features = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self._features = x.mean(0)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), 2 * batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        y = self(batch)
        z = self(batch + self._features)
        self.log("difference", F.mse_loss(y, z))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_private_attributes_of_the_lightning_module_are_known_on_all_ranks() -> None:
    assert_trains_alike(IsTheNetwork, batches, "pp2")
