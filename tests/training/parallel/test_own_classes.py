"""Modules are of their own classes while they are sharded: code may ask for these."""

from __future__ import annotations

from abc import ABC
from typing import Any, Generic, TypeVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import INTERLEAVED, WIDTH, Descends, batches

T = TypeVar("T")


class Module(L.LightningModule):
    """Which layers decay, what the network computes, and what a log is called depend on classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert {Module: True, OfMarked: True}[type(self)]
        assert type(self.blocks) in (nn.Sequential, nn.ModuleList)
        x = self.first(batch)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) if type(block) is nn.Linear else block(x)
        loss = (self.last(x) - batch).square().mean()
        self.log(f"{type(self).__name__}/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert type(self) in (Module, OfMarked)
        decayed: list[Any] = [each.weight for each in self.modules() if type(each) is nn.Linear]
        held = set(map(id, decayed))
        rest = [each for each in self.parameters() if id(each) not in held]
        return torch.optim.SGD([{"params": decayed, "weight_decay": 1.0}, {"params": rest}], lr=0.1)


class Marked(nn.Parameter):
    """As geoopt's ManifoldParameter: optimizers ask for this class."""


class OfMarked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.last.weight = Marked(torch.eye(WIDTH))


def test_code_that_asks_for_classes_does_what_it_does_on_one_process() -> None:
    assert_trains_alike(Module, batches, layouts=["dp2", INTERLEAVED])


def test_parameters_of_a_class_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"last.weight is a Marked"):
        assert_trains_alike(OfMarked, batches, layouts=["dp2"])


REGISTERED: dict[str, type] = {}


class OfRegistry(L.LightningModule):
    def __init_subclass__(cls, key: str) -> None:
        assert key not in REGISTERED
        REGISTERED[key] = cls


class Registered(OfRegistry, key="net"):
    """Its counter is watched by a class that is made for it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), Norm(WIDTH))
        self.steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert all(REGISTERED[key] is kind for key, kind in (("net", Registered), ("layer", Layer), ("norm", Norm)))
        x = self.first(batch) * (1 + self.steps)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        self.steps += 1
        return (self.last(x) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OfLayers(nn.Linear):
    def __init_subclass__(cls, key: str) -> None:
        assert key not in REGISTERED
        REGISTERED[key] = cls


class Layer(OfLayers, key="layer"):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class OfNorms(nn.BatchNorm1d):
    def __init_subclass__(cls, key: str) -> None:
        assert key not in REGISTERED
        REGISTERED[key] = cls


class Norm(OfNorms, key="norm"):
    pass


@pytest.mark.long
def test_registries_of_subclasses_know_the_users_classes_only() -> None:
    whole = {"pipeline_parallel_size": 2, "microbatches": 1}
    assert_trains_alike(Registered, batches, layouts=[whole])
    assert_trains_alike(Registered, batches, layouts=["dp2"], trainer={"sync_batchnorm": True})


class OfBases(ABC, Descends):
    """Objects of a class whose first base is another than a module have another memory layout in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Typed() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x - batch).square().mean()


class Typed(Generic[T], nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert type(self) is Typed
        return self.layer(x)


def test_classes_whose_first_base_is_no_module_train_alike() -> None:
    assert_trains_alike(OfBases, batches, layouts=["dp2"])
