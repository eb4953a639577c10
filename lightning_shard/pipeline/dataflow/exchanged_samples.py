"""Two microbatches with half of their samples exchanged, or joined to one, with what a stage received for them.

A received tensor may have its samples first, second, or several rows for each: those of a sample one after the other
(frames), or all samples' first rows before all second ones (two views). Each of these is a reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import BatchError
from lightning_shard.pipeline.dataflow.messages import BlockCall, Key

READINGS = 4
"""At most."""


class Given(NamedTuple):
    """A microbatch, and what a stage is given of the stages before.

    Attributes:
        received: Values.
        calls: Those of earlier stages' blocks, by place, with the shapes of this microbatch; ``None`` if these are as
            before.
    """

    microbatch: Any
    received: dict[Key, Tensor]
    calls: dict[int, BlockCall] | None = None


@dataclass(frozen=True)
class Pair:
    """Two microbatches, what a stage received for them, and the calls of earlier stages' blocks in each, by place."""

    one: Any
    other: Any
    received: Mapping[Key, Tensor]
    other_received: Mapping[Key, Tensor]
    calls: Mapping[int, BlockCall]

    @property
    def size(self) -> int:
        return tree.batch_size(self.other)

    @property
    def second(self) -> Given:
        return Given(self.other, dict(self.other_received))

    def is_alike(self) -> bool:
        """Whether what was received is of the same structure."""
        return self.received.keys() == self.other_received.keys() and all(
            value.shape == self.other_received[key].shape for key, value in self.received.items()
        )

    def is_clear(self) -> bool:
        """Whether what was received is alike, and has a place for the samples, or is the same for all."""
        return self.is_alike() and all(
            is_number(value) or _places(key, value, self.size) or torch.equal(value, self.other_received[key])
            for key, value in self.received.items()
        )

    def readings(self) -> int:
        """In how many ways the samples may lie in what was received."""
        return max((len(self.choices(key)) for key in self.received), default=1) or 1

    def choices(self, key: Key) -> list[Place | None]:
        """Where the samples may lie in what was received; ``None`` for nowhere, as in a table that all samples share.

        What is equal for both microbatches may be such a table, whatever its size, or of samples all the same, as of a
        layer whose units are all off.
        """
        value, twin = self.received[key], self.other_received[key]
        is_shared = torch.equal(value, twin) and (self.size == 1 or value.is_floating_point())
        return [*([None] if is_shared else []), *_places(key, value, self.size)]


def exchanged_halves(pair: Pair, reading: int) -> tuple[Given, Given] | None:
    """Two microbatches, and what was received for them, with half of their samples exchanged.

    ``None`` if they hold one sample each, if they can't be joined or cut, or if a received value has no place for them.

    Args:
        reading: Which of the ways in which the samples may lie in what was received.
    """
    size = pair.size
    if size < 2 or not pair.is_alike():
        return None
    given: tuple[dict[Key, Tensor], dict[Key, Tensor]] = ({}, {})
    for key, value in pair.received.items():
        twin = pair.other_received[key]
        if is_number(value):
            both = (value + twin) / 2, (value + twin) / 2  # right for means; the stage that sends it checks that
        elif found := _places(key, value, size):
            place = found[min(reading, len(found) - 1)]
            both = exchanged(value, twin, place), exchanged(twin, value, place)
        elif torch.equal(value, twin):
            both = value, twin
        else:
            return None
        for each, tensor in zip(given, both):
            each[key] = tensor
    try:
        parts = tree.with_half_of(pair.one, pair.other, size), tree.with_half_of(pair.other, pair.one, size)
    except BatchError:
        return None
    return Given(parts[0], given[0]), Given(parts[1], given[1])


def joined_pair(pair: Pair, reading: int) -> Given | None:
    """One microbatch of the samples of both, and what was received for them; ``None`` if they can't be joined.

    Args:
        reading: Which of the ways in which the samples may lie in what was received.
    """
    if not pair.is_clear():
        return None
    given = {}
    for key, value in pair.received.items():
        twin, choices = pair.other_received[key], pair.choices(key)
        place = choices[min(reading, len(choices) - 1)] if choices else None
        if place is None and choices:
            given[key] = value
        elif pair.size == 1 and value.ndim <= 1:
            return None  # it may be of the sample, a mean or a sum
        elif is_number(value):
            given[key] = (value + twin) / 2
        elif place is not None:
            given[key] = joined(value, twin, place)
        else:
            given[key] = value
    shape_of = partial(_joined_shape, size=pair.size, reading=reading)
    calls = {place: call.of_shapes(shape_of) for place, call in pair.calls.items()}
    try:
        return Given(tree.joined(pair.one, pair.other, pair.size), given, calls)
    except BatchError:
        return None


def is_number(value: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point()


class Place(NamedTuple):
    """Where samples lie in a tensor: along a dimension of it, when it has this shape."""

    shape: tuple[int, ...]
    dim: int


def _places(key: Key, value: Tensor, size: int) -> list[Place]:
    return [] if key[0] == "parameter" else places(tuple(value.shape), size)


def places(shape: tuple[int, ...], size: int) -> list[Place]:
    """Where so many samples may lie in a tensor of this shape, the most likely first."""
    if not shape:
        return []
    dims = (0,) if size == shape[0] == 1 else range(min(2, len(shape)))  # 1 × 1: not also the second
    found = [Place(shape, dim) for dim in dims if shape[dim] == size]
    several, rest = divmod(shape[0], size)
    if several > 1 and not rest:
        found += [Place((size, several, *shape[1:]), 0), Place((several, size, *shape[1:]), 1)]
    return found


def _joined_shape(shape: tuple[int, ...], size: int, reading: int) -> tuple[int, ...]:
    """The shape of a tensor of two microbatches that has this one for each; the same if it has no place for samples."""
    found = places(shape, size)
    if not found:
        return shape
    place = found[min(reading, len(found) - 1)]
    dim = place.dim if len(place.shape) == len(shape) else 0
    return (*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])


def exchanged(tensor: Tensor, other: Tensor, place: Place) -> Tensor:
    shape, dim = place
    mine, others, half = tensor.reshape(shape), other.reshape(shape), shape[dim] // 2
    both = torch.cat([others.narrow(dim, 0, half), mine.narrow(dim, half, shape[dim] - half)], dim)
    return both.reshape(tensor.shape)


def joined(tensor: Tensor, other: Tensor, place: Place) -> Tensor:
    shape, dim = place
    both = torch.cat([tensor.reshape(shape), other.reshape(shape)], dim)
    return both.flatten(0, 1) if len(shape) > tensor.ndim else both
