"""Extrapolates counts to any number of samples from those of one and two, and compares counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lightning_shard.dryrun.counting.counts import Counts, PartCount, Work

ALIKE = 1e-3
"""Allowed relative deviation of work from linear growth: with one sample some copies are avoided."""


def between(one: Counts, two: Counts, samples: int) -> Counts:
    """Counts of ``samples`` samples, extrapolated linearly from those of one and two."""
    made: Counts = _grown(one, two, samples - 1)
    return made


def _grown(one: Any, two: Any, times: int) -> Any:
    if isinstance(one, (bool, str)):
        return one
    if isinstance(one, int):
        return one + times * (two - one)
    if isinstance(one, tuple):
        return tuple(_grown(a, b, times) for a, b in zip(one, two, strict=True))
    if isinstance(one, Mapping):
        return {key: _grown(one.get(key, 0), two.get(key, 0), times) for key in {**one, **two}}
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return type(one)(
            **{f.name: _grown(getattr(one, f.name), getattr(two, f.name), times) for f in dataclasses.fields(one)}
        )
    return one


def is_like(counted: Counts, scaled: Counts) -> bool:
    """Whether the work in two counts, on which bounds are based, agrees within :data:`ALIKE`; peaks may differ."""
    return _is_near(_work_of(counted), _work_of(scaled))


def _work_of(counts: Counts) -> list[Any]:
    parts = [*counts.blocks, *(part for _, part in counts.parts), *counts.everywhere, counts.loss]
    costs = [cost for part in parts for cost in (part.plain, part.recomputed, part.selective)]
    return [*(part.output for part in parts), *(work for cost in costs for work in (cost.forward, cost.backward))]


def _is_near(one: Any, other: Any) -> bool:
    if isinstance(one, int):
        return math.isclose(one, other, rel_tol=ALIKE)
    if isinstance(one, Mapping):
        return all(_is_near(one.get(key, 0), other.get(key, 0)) for key in {**one, **other})
    if isinstance(one, Work):
        return _is_near(list(vars(one).values()), list(vars(other).values()))
    return all(_is_near(a, b) for a, b in zip(one, other, strict=True))


def kind_of(part: PartCount) -> Any:
    """A key of everything that is known about a block, except names."""
    parameters = tuple(dataclasses.replace(parameter, name="") for parameter in part.parameters)
    return parameters, part.output, repr((part.plain, part.recomputed, part.selective))
