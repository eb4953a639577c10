"""Whether a difference is rounding's: one process is run once more, on weights that are changed in their last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_shard.testing import TrainsDifferently
from lightning_shard.testing.alike import OneProcess
from lightning_shard.testing.compare import Record, first_parting
from lightning_shard.testing.layouts import parse

_SEED = 3


def moves_as_far(alone: OneProcess, nearby: OneProcess, different: TrainsDifferently) -> bool:
    """Whether ``nearby`` is as far from ``alone``, where a layout first parted from it, as the layout was."""
    moment = different.moment
    there: list[Record] = [{moment: process.record[moment]} for process in (alone, nearby)]
    parting = first_parting(there[0], there[1:], parse("dp1", {}), 0.0)
    furthest = max(apart.relative for apart in (different.first, *different.others))
    return parting is not None and max(apart.relative for apart in parting.apart) >= furthest


def in_last_bit(make_module: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the same module, each of whose weights is its neighbour among floating-point numbers, up or down."""
    return partial(_changed, make_module)


def _changed(make_module: Callable[[], Any]) -> Any:
    module = make_module()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in module.parameters():
            ends = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.copy_(torch.nextafter(parameter, ends * torch.inf))
    return module
