"""Who holds, writes and reads which box of a tensor: plain integer arithmetic, no torch, no I/O.

Terms: a *run* is a half-open interval of indices along one dim; a *box* is one run per dim. A rank's local tensor is
the product, over dims, of one list of runs each; the rows of the local tensor are the runs' indices in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Run = tuple[int, int]
Runs = tuple[Run, ...]


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
        """The place of its first element in a row-major tensor of that shape."""
        return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(self.offsets))

    def within(self, outer: Box) -> Box:
        """The same box, counted from the corner of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def intersection(offsets: Sequence[int], sizes: Sequence[int], box: Box) -> Box | None:
    """The elements of a box that are also in the one at ``offsets`` of ``sizes``; None where there are none."""
    corner, extent = [], []
    for a, n, b, m in zip(offsets, sizes, box.offsets, box.sizes, strict=True):
        start = a if a > b else b
        length = (a + n if a + n < b + m else b + m) - start
        if length <= 0:
            return None
        corner.append(start)
        extent.append(length)
    return Box(tuple(corner), tuple(extent))


@dataclass(frozen=True)
class Split:
    """One mesh axis that shards dim ``dim`` into ``parts`` of which this rank has the ``index``-th.

    ``split_factor`` > 1 is torch's strided shard: the dim is first cut into that many pieces, and each is then cut into
    ``parts``. Fully sharded data parallelism over tensor parallelism on the same dim is written so.
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1


@dataclass(frozen=True)
class LocalBox:
    """A box of the global tensor, and where it begins in the rank's local tensor."""

    box: Box
    local_offsets: tuple[int, ...]


# -- sharding: from placements to boxes -------------------------------------------------------------------------------


def cut(runs: Runs, parts: int, index: int) -> Runs:
    """The ``index``-th of ``parts`` pieces, as ``torch.chunk`` cuts: ⌈n/parts⌉ each, and the last fewer or none."""
    total = sum(stop - start for start, stop in runs)
    step = -(-total // parts)
    return _take(runs, min(total, index * step), min(total, (index + 1) * step))


def shard(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Runs, ...]:
    """This rank's runs per dim, with ``splits`` applied left to right, as a DTensor's placements are defined."""
    runs: list[Runs] = [((0, size),) for size in shape]
    for split in splits:
        before = runs[split.dim]
        if split.split_factor == 1:
            runs[split.dim] = cut(before, split.parts, split.index)
        else:
            pieces = (cut(before, split.split_factor, piece) for piece in range(split.split_factor))
            runs[split.dim] = _join(run for piece in pieces for run in cut(piece, split.parts, split.index))
    return tuple(runs)


def shard_strided_last(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Runs, ...]:
    """The same with strided splits applied last, from right to left, as plain ones: what FSDP2 does to a DTensor.

    For sizes that divide evenly this equals :func:`shard`; for others FSDP2's placements don't describe its shards,
    and this does. Only meaningful where :func:`strided_factors_fit`.
    """
    plain = [split for split in splits if split.split_factor == 1]
    strided = [Split(s.dim, s.parts, s.index) for s in splits if s.split_factor > 1]
    return shard(shape, [*plain, *reversed(strided)])


def strided_factors_fit(splits: Sequence[Split]) -> bool:
    """Whether each strided split counts exactly the pieces that later mesh axes make of its dim."""
    for position, split in enumerate(splits):
        later = math.prod(other.parts for other in splits[position + 1 :] if other.dim == split.dim)
        if split.split_factor not in (1, later):
            return False
    return True


def local_boxes(runs: Sequence[Runs]) -> list[LocalBox]:
    """The boxes that the product of the runs is made of; none where it is empty."""
    per_dim = []
    for dim_runs in runs:
        position, places = 0, []
        for start, stop in dim_runs:
            if stop > start:
                places.append((start, stop - start, position))
                position += stop - start
        per_dim.append(places)
    return [
        LocalBox(Box(tuple(p[0] for p in places), tuple(p[1] for p in places)), tuple(p[2] for p in places))
        for places in itertools.product(*per_dim)
    ]


def local_shape(runs: Sequence[Runs]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in dim_runs) for dim_runs in runs)


def _take(runs: Runs, first: int, last: int) -> Runs:
    """The indices at positions ``first`` to ``last`` of the runs."""
    taken, position = [], 0
    for start, stop in runs:
        low, high = max(first - position, 0), min(last - position, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        position += stop - start
    return tuple(taken)


def _join(runs: Iterator[Run]) -> Runs:
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


# -- sharing: what each of several equal holders writes ---------------------------------------------------------------

MIN_PART_BYTES = 64 * 2**10
"""A tensor isn't cut into parts smaller than this."""
POOL_BYTES = 64 * 2**10
"""So much of the smallest items is one holder's: whoever reads them all, such as optimizers' steps, opens one file."""


@dataclass(frozen=True)
class Shared:
    """Boxes of one tensor that several ranks hold alike, ``item_bytes`` per element."""

    box: Box
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.item_bytes


def share(items: Sequence[Shared], holders: int, index: int) -> list[Box | None]:
    """What the ``index``-th of ``holders`` writes of each item, so that all write alike much.

    The smallest items, up to :data:`POOL_BYTES`, are the first holder's. The others, laid end to end, are cut into
    ``holders`` equal lengths; a cut that falls into an item moves to the nearest of its rows. Every rank reckons this
    alike and without talking, and each element has exactly one writer.

    Returns:
        Per item the part that this holder writes, or None.
    """
    cuts = _Cuts(items, holders)
    return [cuts.part(number, index) for number in range(len(items))]


def deal(items: Sequence[Shared], holders: int) -> Iterator[tuple[int, int, Box]]:
    """The same for all holders at once: an item's number, a holder's index, and what that holder has of it."""
    cuts = _Cuts(items, holders)
    for number, item in enumerate(items):
        for index in cuts.near(number) if item.box.numel else ():
            if (part := cuts.part(number, index)) is not None:
                yield number, index, part


class _Cuts:
    """Items laid end to end, cut into ``holders`` equal lengths."""

    def __init__(self, items: Sequence[Shared], holders: int) -> None:
        self._items = items
        self._holders = holders
        self._pooled = _pool([item.nbytes for item in items])
        sizes = [0 if number in self._pooled else item.nbytes for number, item in enumerate(items)]
        self._positions = list(itertools.accumulate(sizes, initial=0))
        self._total = self._positions[-1]

    def near(self, number: int) -> range:
        """Of the holders, those that may have a part of an item."""
        if number in self._pooled:
            return range(1)
        first, last = (at * self._holders // self._total for at in self._positions[number : number + 2])
        return range(max(first - 1, 0), min(last + 2, self._holders))

    def part(self, number: int, index: int) -> Box | None:
        """What a holder has of an item."""
        item, position = self._items[number], self._positions[number]
        if number in self._pooled:
            return item.box if index == 0 else None
        last_one = index == self._holders - 1
        low, high = self._total * index / self._holders, self._total * (index + 1) / self._holders
        dim = next((d for d, size in enumerate(item.box.sizes) if size > 1), None)
        rows = 1 if dim is None else item.box.sizes[dim]
        row_bytes = item.nbytes / rows
        if item.nbytes == 0 or rows == 1 or item.nbytes < 2 * MIN_PART_BYTES:
            middle = position + item.nbytes / 2
            return item.box if low <= middle < high or (middle >= self._total and last_one) else None
        first = _nearest_row(low - position, row_bytes, rows)
        last = rows if last_one else _nearest_row(high - position, row_bytes, rows)
        return _rows(item.box, dim, first, last) if first < last else None


def _pool(sizes: Sequence[int]) -> set[int]:
    pool: set[int] = set()
    total = 0
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number]):
        total += sizes[number]
        if total > POOL_BYTES:
            break
        pool.add(number)
    return pool


def _nearest_row(nbytes: float, row_bytes: float, rows: int) -> int:
    """The row boundary nearest to a byte position, none at which a part would be very small."""
    row = min(max(round(nbytes / row_bytes), 0), rows)
    if 0 < row * row_bytes < MIN_PART_BYTES:
        return 0
    if 0 < (rows - row) * row_bytes < MIN_PART_BYTES:
        return rows
    return row


def _rows(box: Box, dim: int | None, first: int, last: int) -> Box:
    assert dim is not None
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += first
    sizes[dim] = last - first
    return Box(tuple(offsets), tuple(sizes))


# -- streaming --------------------------------------------------------------------------------------------------------


def slabs(box: Box, elements: int, multiple: Callable[[int], int] = lambda dim: 1) -> Iterator[Box]:
    """Boxes that follow on one another in row-major order, none of more ``elements``; none for an empty box.

    ``multiple`` says of how many rows along a dim a box should be, where so many fit in.
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
        yield from slabs(_rows(box, dim, first, min(first + rows, box.sizes[dim])), elements, multiple)


# -- checking ---------------------------------------------------------------------------------------------------------


def coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should make up a tensor, each element once; None where nothing is."""
    if _is_grid(shape, boxes):
        return None
    whole = Box.whole(shape)
    for box in boxes:
        if box.numel and box.intersect(whole) != box:
            return f"the box at {box.offsets} of {box.sizes} isn't inside of {tuple(shape)}"
    full = [box for box in boxes if box.numel]
    pair = _overlap(full)
    if pair is not None:
        a, b = pair
        return f"the boxes at {a.offsets} of {a.sizes} and at {b.offsets} of {b.sizes} overlap"
    covered = sum(box.numel for box in full)
    if covered != whole.numel:
        return f"{whole.numel - covered:,} of {whole.numel:,} elements are in no box"
    return None


def _is_grid(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes are all the cells of one grid over the shape, as nearly every layout gives: told fast."""
    cells = 1
    for dim, size in enumerate(shape):
        runs = {(box.offsets[dim], box.sizes[dim]) for box in boxes}
        cells *= len(runs)
        end = 0
        for offset, length in sorted(runs):
            if offset != end or length <= 0:
                return False
            end = offset + length
        if end != size:
            return False
    # as many different ones as there are cells, and each is one of these
    return cells == len(boxes) == len({box.offsets for box in boxes})


def _overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap. Sweeps along the dim with the most starts, so that few are compared."""
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
