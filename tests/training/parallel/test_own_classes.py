"""Modules are of their own classes while they are sharded: code may ask for these."""

from __future__ import annotations

from abc import ABC
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import Descends, random_batches

WIDTH = 8
INTERLEAVED = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}


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


batches = partial(random_batches, 8, WIDTH)


def test_code_that_asks_for_classes_does_what_it_does_on_one_process() -> None:
    assert_trains_alike(Module, batches, layouts=["dp2", INTERLEAVED])


def test_parameters_of_a_class_of_ones_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"last.weight is a Marked"):
        assert_trains_alike(OfMarked, batches, layouts=["dp2"])


class OfRegistry(nn.Linear):
    def __init_subclass__(cls, key: str) -> None:
        cls.key = key


class Registered(OfRegistry, key="layer"):
    pass


class OfBases(ABC, nn.Linear):
    """Objects of a class whose first base is another than a module have another memory layout in Python."""


class OfOwn(Descends):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return (x - batch).square().mean()


@pytest.mark.parametrize("kind", [Registered, OfBases])
def test_classes_of_which_there_can_be_no_subclass_are_refused(kind: type[nn.Linear]) -> None:
    with pytest.raises(ConfigurationError, match=rf"can't shard a {kind.__name__}.*name nn\.Module.* first"):
        assert_trains_alike(partial(OfOwn, kind), batches, layouts=["dp2"], steps=1)
