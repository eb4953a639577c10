"""Boxes (hyperrectangles) of a tensor: intersection, cutting, and whether boxes tile a tensor exactly.

Integer arithmetic, no torch, no I/O.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_PRIME = np.uint64(2**31 - 1)
"""So that a product of two numbers, one of them a difference, fits into 64 bits."""
_MEASURES = 3
_STEP_BOXES = 2**14


@dataclass(frozen=True)
class Box:
    """A box of a tensor: ``offsets`` and ``sizes``, in elements, one per dim. A 0-d tensor is the box ``((), ())``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def first(self, shape: Sequence[int]) -> int:
        """The flat index of the box's first element in a row-major tensor of ``shape``."""
        return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(self.offsets))

    def within(self, outer: Box) -> Box:
        """The same box, with offsets relative to the first corner of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def intersection(offsets: Sequence[int], sizes: Sequence[int], box: Box) -> Box | None:
    """The intersection of ``box`` with the box (``offsets``, ``sizes``); None if it is empty."""
    corner, extent = [], []
    for a, n, b, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
        start = a if a > b else b
        length = (a + n if a + n < b + m else b + m) - start
        if length <= 0:
            return None
        corner.append(start)
        extent.append(length)
    return Box(tuple(corner), tuple(extent))


def rows_of(box: Box, dim: int | None, first: int, last: int) -> Box:
    """The part of a box from row ``first`` up to ``last`` (exclusive) along ``dim``, counted from the box's corner."""
    assert dim is not None
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += first
    sizes[dim] = last - first
    return Box(tuple(offsets), tuple(sizes))


def slabs(box: Box, elements: int, multiple: Callable[[int], int] = lambda dim: 1) -> Iterator[Box]:
    """Cut a box into boxes of at most ``elements`` each, in row-major order; yields none for an empty box.

    ``multiple(dim)``: the number of rows along ``dim`` should be a multiple of it, where that many fit into a box.
    """
    if box.numel == 0:
        return
    if box.numel <= elements:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, elements * box.sizes[dim] // box.numel)
    rows -= rows % multiple(dim) if rows >= multiple(dim) else 0
    for first in range(0, box.sizes[dim], rows):
        yield from slabs(rows_of(box, dim, first, min(first + rows, box.sizes[dim])), elements, multiple)


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why boxes inside a tensor don't cover it, each element exactly once, in words."""
    whole, covered = math.prod(shape), sum(box.numel for box in boxes)
    if covered < whole:
        return f"{whole - covered:,} of {whole:,} elements are in no box"
    return f"{len(boxes):,} boxes of {covered:,} elements overlap in a tensor of {whole:,}"


def uncovered(shapes: Integers, bounds: Integers, offsets: Integers, sizes: Integers) -> NDArray[np.bool_]:
    """For each of many tensors, whether its boxes fail to cover it, each element exactly once; in linear time.

    Compares a random measure, which is additive as the volume is, but differs between boxes of equal volume: each
    coordinate of each dim gets a random number, and a box measures the product over dims of (number at its end − number
    at its begin) modulo a prime. Boxes that don't cover the whole have the same measure with a probability of ``ndim /
    _PRIME`` in each of :data:`_MEASURES` independent trials (Schwartz–Zippel lemma: the sum of measures is a polynomial
    in the random numbers, and is identical to the whole's only for an exact cover).

    Args:
        shapes: ``(tensors, dims)``; tensors of fewer dims are padded by dims of size 1.
        bounds: ``(tensors + 1,)``: tensor ``i`` has the boxes from ``bounds[i]`` up to ``bounds[i + 1]``.
        offsets, sizes: ``(boxes, dims)``, each box inside its tensor, padded by offset 0 and size 1.
    """
    wrong = np.zeros(len(shapes), bool)
    corners = np.zeros_like(shapes)
    for _ in range(_MEASURES):
        keys = [secrets.randbits(64) for _ in range(shapes.shape[1])]
        sums = np.zeros(len(offsets) + 1, np.uint64)
        for first in range(0, len(offsets), _STEP_BOXES):  # in steps that stay in the cache
            step = slice(first, first + _STEP_BOXES)
            sums[1:][step] = _measure(offsets[step], sizes[step], keys)
        sums = np.cumsum(sums)  # below 2**64 for 2**33 boxes
        wrong |= (sums[bounds[1:]] - sums[bounds[:-1]]) % _PRIME != _measure(corners, shapes, keys)
    return wrong


def _measure(offsets: Integers, sizes: Integers, keys: Sequence[int]) -> NDArray[np.uint64]:
    product = np.ones(len(offsets), np.uint64)
    for dim, key in enumerate(keys):
        begin, end = offsets[:, dim], offsets[:, dim] + sizes[:, dim]
        product = product * (_number_at(end, key) + _PRIME - _number_at(begin, key)) % _PRIME
    return product


def _number_at(coordinates: Integers, key: int) -> NDArray[np.uint64]:
    """A random number below the prime for each coordinate: the hash SplitMix64, keyed."""
    mixed = coordinates.astype(np.uint64) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(33)) % _PRIME
