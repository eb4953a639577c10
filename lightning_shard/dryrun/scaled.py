"""Counts of any number of samples from those of one and two, and when two counts say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning_shard.dryrun.counts import Counts, PartCount


def between(one: Counts, two: Counts, samples: int) -> Counts:
    """Counts of any number of samples, as if each number grew alike from one sample to the next."""
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


def work_of(counts: Counts) -> list[Any]:
    """What bounds are made of."""
    parts = [*counts.blocks, *(part for _, part in counts.parts), *counts.everywhere, counts.loss]
    return [
        (part.output, [(cost.forward, cost.backward) for cost in (part.plain, part.recomputed, part.selective)])
        for part in parts
    ]


def kind_of(part: PartCount) -> Any:
    """All that is known of a block but its names."""
    parameters = tuple(dataclasses.replace(parameter, name="") for parameter in part.parameters)
    return parameters, part.output, repr((part.plain, part.recomputed, part.selective))
