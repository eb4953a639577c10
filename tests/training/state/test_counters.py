"""What a step keeps counts once for each microbatch, which is seen in what two leave and both as one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_shard.plugin.steps.state.counters import left_otherwise, numbers_kept

ONE, OTHER = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]])


class Meter:
    def __init__(self) -> None:
        self.seen = 0


CENTER = {"of classes": torch.zeros(2)}


class Keeps(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.batches, self.samples, self.lowest, self.name = 0, 0, math.nan, "a"
        self.norm, self.block = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.block.calls = 0  # type: ignore[assignment]
        self.metric, self.meter, self.kept = MeanMetric(), Meter(), {"steps": 0}
        self.listed: list[Any] = []
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        CENTER["of classes"] = CENTER["of classes"] * 0.9 + x.mean(0)
        return x


def loss(module: Keeps, x: Tensor) -> None:
    module.loss = x.mean()


def table(module: Keeps, x: Tensor) -> None:
    module.table = torch.ones(len(x), 2)


WAYS: dict[str, tuple[Callable[[Keeps, Tensor], Any], set[str]]] = {
    "batches": (lambda m, x: setattr(m, "batches", m.batches + 1), {"batches"}),
    "samples": (lambda m, x: setattr(m, "samples", m.samples + len(x)), set()),
    "of a block": (lambda m, x: setattr(m.block, "calls", m.block.calls + 1), {"block.calls"}),
    "of an object": (lambda m, x: setattr(m.meter, "seen", m.meter.seen + 1), {"meter.seen"}),
    "in a dict": (lambda m, x: m.kept.update(steps=m.kept["steps"] + 1), {"kept.steps"}),
    "a moving average": (lambda m, x: m.mean.data.mul_(0.9).add_(x.mean(0)), {"mean"}),  # no version says so
    "a sum": (lambda m, x: m.total.add_(x.sum(0)), set()),
    "in globals": (lambda m, x: m(x), {f"{__name__}.CENTER.of classes"}),
    "a loss that is first made in a step": (loss, {"loss"}),
    "a table for a shape": (table, set()),
    "a metric, statistics and a history": (lambda m, x: (m.metric(x), m.norm(x), m.listed.append(x)), set()),
    "nothing": (lambda m, x: setattr(m, "name", "b"), set()),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_counts_twice_is_named(way: str) -> None:
    step, expected = WAYS[way]
    module = Keeps()
    step(module, ONE)  # the batch that was before
    step(module, OTHER)
    begin, center, as_one = numbers_kept(module), CENTER["of classes"], copy.deepcopy(module)
    step(module, ONE)
    first = numbers_kept(module)
    step(module, OTHER)
    both = numbers_kept(module)
    CENTER["of classes"] = center
    step(as_one, torch.cat([ONE, OTHER]))
    assert {*left_otherwise(begin, first, both, numbers_kept(as_one))} == expected
