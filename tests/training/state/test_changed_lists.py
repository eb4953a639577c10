"""A network's parameters and buffers changed as one list, as averages of a whole state are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.testing import run_ranks
from tests.training.parallel.test_changed_weights import Plain, Teaches, check, fits

foreach: Any = torch


class Statistics(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift += 0.1
            self.count += 1
        return x + self.shift


class Averages(Teaches):
    """As timm's ModelEmaV3, for parameters and BatchNorm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        for net in (self.net, self.teacher):
            net.first = nn.Sequential(net.first, Statistics())  # type: ignore[assignment]

    def lists(self) -> tuple[list[Tensor], list[Tensor]]:
        both = zip(self.teacher.state_dict().values(), self.net.state_dict().values())
        old, new = zip(*(pair for pair in both if pair[0].is_floating_point()))
        return list(old), list(new)

    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            foreach._foreach_lerp_(*self.lists(), weight=0.5)


class AveragesByTwo(Averages):
    def on_before_zero_grad(self, *_: Any) -> None:
        old, new = self.lists()
        with torch.no_grad():
            foreach._foreach_mul_(old, 0.5)
            foreach._foreach_add_(old, new, alpha=0.5)


class Copies(Averages):
    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            foreach._foreach_copy_(*self.lists())


class Mixes(Averages):
    """The values beside the parameters are plain."""

    def on_before_zero_grad(self, *_: Any) -> None:
        with torch.no_grad():
            old, new = self.lists()
            foreach._foreach_lerp_(old, [torch.zeros(each.shape) for each in new], weight=0.5)


ALIKE: list[type[Plain]] = [AveragesByTwo, Copies]
REFUSED: dict[type[Plain], str] = {Mixes: "mixed torch.Tensor and DTensor"}


def test_lists_of_parameters_and_buffers_are_changed_as_in_one_process() -> None:
    kinds = [*ALIKE, *REFUSED]
    found, _ = run_ranks(fits, 2, kinds, 2, elastic=True, timeout_s=200)
    check(kinds, found, REFUSED)
