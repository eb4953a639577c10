"""Boxes (hyperrectangles) of a tensor: intersection, cutting, and whether boxes tile a tensor exactly.

Plain integer arithmetic, no torch, no I/O.
"""

from __future__ import annotations

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

SEARCHED_BOXES = 2000
"""With more boxes, no overlapping pair is searched for an error message: that takes quadratic time."""
_PRIME = 2**127 - 1


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

    def intersect(self, other: Box) -> Box | None:
        """The elements in both, or None where there are none."""
        return intersection(self.offsets, self.sizes, other)

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


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Check that boxes cover a tensor, each element exactly once. Returns a text of the fault, or None."""
    if is_grid(shape, [(box.offsets, box.sizes) for box in boxes]):
        return None
    whole = Box.whole(shape)
    for box in boxes:
        if box.numel and box.intersect(whole) != box:
            return f"the chunk at offsets {box.offsets} with sizes {box.sizes} isn't inside the shape {tuple(shape)}"
    full = [box for box in boxes if box.numel]
    if _make_up(whole, full):
        return None
    pair = _overlap(full) if len(full) <= SEARCHED_BOXES else None
    if pair is not None:
        a, b = pair
        return f"the boxes at {a.offsets} of {a.sizes} and at {b.offsets} of {b.sizes} overlap"
    covered = sum(box.numel for box in full)
    if covered < whole.numel:
        return f"{whole.numel - covered:,} of {whole.numel:,} elements are in no box"
    return f"{len(full):,} boxes of {covered:,} elements overlap in a tensor of {whole.numel:,}"


def _make_up(whole: Box, boxes: Sequence[Box]) -> bool:
    """Whether boxes inside ``whole`` cover it, each element exactly once, in time linear in their number.

    Compares a random measure, which is additive as the volume is, but differs between boxes of equal volume: each
    coordinate of each dim gets a random number, and a box measures the product over dims of (number at its end − number
    at its begin). Boxes that don't cover the whole have the same measure with a probability of ``ndim / _PRIME``
    (Schwartz–Zippel lemma: the sum of measures is a polynomial in the random numbers, and is identical to the whole's
    only for an exact cover).
    """
    if sum(box.numel for box in boxes) != whole.numel:
        return False
    numbers: list[defaultdict[int, int]] = [defaultdict(lambda: secrets.randbelow(_PRIME)) for _ in whole.sizes]

    def measure(box: Box) -> int:
        product = 1
        for at, offset, size in zip(numbers, box.offsets, box.sizes):
            product = product * (at[offset + size] - at[offset]) % _PRIME
        return product

    return sum(map(measure, boxes)) % _PRIME == measure(whole)


def is_grid(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) are exactly the cells of one grid over the shape, as nearly every layout gives.

    A fast check, and safe for boxes of any values and lengths, also invalid ones.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        return False
    cells = 1
    for dim, size in enumerate(shape):
        runs = {(offsets[dim], sizes[dim]) for offsets, sizes in boxes}
        cells *= len(runs)
        end = 0
        for offset, length in sorted(runs):
            if offset != end or length <= 0:
                return False
            end = offset + length
        if end != size:
            return False
    # each box is a cell by construction; distinct boxes, as many as cells, are therefore all of the cells
    return cells == len(boxes) == len({offsets for offsets, _ in boxes})


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Find two boxes that overlap, by a sweep along the dim with the most distinct offsets, to compare few pairs."""
    if len(boxes) < 2:
        return None
    ndim = len(boxes[0].sizes)
    if ndim == 0:
        return boxes[0], boxes[1]
    along = max(range(ndim), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[along]):
        start = box.offsets[along]
        active = [other for other in active if other.offsets[along] + other.sizes[along] > start]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None
