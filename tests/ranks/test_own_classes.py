"""Modules are of their own classes while they are sharded: code may ask for these."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.testing import assert_trains_alike

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


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=made) for _ in range(3)]


def test_code_that_asks_for_classes_does_what_it_does_on_one_process() -> None:
    assert_trains_alike(Module, batches, layouts=["dp2", "pp2", "pp2 x dp2", INTERLEAVED])


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_parameters_of_a_class_of_ones_own_are_refused(layout: str) -> None:
    with pytest.raises(ConfigurationError, match=r"last.weight is a Marked"):
        assert_trains_alike(OfMarked, batches, layouts=[layout])
