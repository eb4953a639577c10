"""Computes from a DTensor's placements the boxes that a rank holds: plain integer arithmetic, no torch, no I/O.

Terms: a *run* is a half-open interval of indices along one dim; a *box* is one run per dim. A rank's local tensor is
the Cartesian product, over dims, of one list of runs each; its rows along a dim are the runs' indices in order.

Replicated tensors are divided among the ranks that hold them: each writes (or reads) about as many bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_shard.checkpoint.boxes import Box, rows_of

Run = tuple[int, int]
Runs = tuple[Run, ...]


@dataclass(frozen=True)
class Split:
    """One mesh axis that shards tensor dim ``dim`` into ``parts``; this rank holds the ``index``-th.

    ``split_factor`` > 1 is torch's ``_StridedShard``: the dim is first cut into that many pieces, and each is then cut
    into ``parts``. FSDP over tensor parallelism on the same dim has such placements.
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1


@dataclass(frozen=True)
class LocalBox:
    """A box of the global tensor, and its offsets in the rank's local tensor."""

    box: Box
    local_offsets: tuple[int, ...]


def cut(runs: Runs, parts: int, index: int) -> Runs:
    """The ``index``-th of ``parts`` pieces, cut as by ``torch.chunk``: ⌈n/parts⌉ each, the last ones fewer or none."""
    total = sum(stop - start for start, stop in runs)
    step = -(-total // parts)
    return _take(runs, min(total, index * step), min(total, (index + 1) * step))


def shard(shape: Sequence[int], splits: Sequence[Split]) -> tuple[Runs, ...]:
    """This rank's runs per dim: ``splits`` applied left to right, as DTensor placements are defined."""
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
    """As :func:`shard`, but strided splits come last, from right to left, as plain ones: how FSDP2 shards a DTensor.

    For sizes that divide evenly this equals :func:`shard`. For uneven sizes FSDP2's placements don't describe its
    shards, and this function does. Only valid where :func:`strided_factors_fit`.
    """
    plain = [split for split in splits if split.split_factor == 1]
    strided = [Split(s.dim, s.parts, s.index) for s in splits if s.split_factor > 1]
    return shard(shape, [*plain, *reversed(strided)])


def strided_factors_fit(splits: Sequence[Split]) -> bool:
    """Whether each ``split_factor`` equals the number of pieces that later mesh axes cut the same dim into."""
    for position, split in enumerate(splits):
        later = math.prod(other.parts for other in splits[position + 1 :] if other.dim == split.dim)
        if split.split_factor not in (1, later):
            return False
    return True


def local_boxes(runs: Sequence[Runs]) -> list[LocalBox]:
    """The boxes of the product of the runs; an empty list for an empty local tensor."""
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
    """The runs of the indices at positions ``first`` up to ``last`` (exclusive) of ``runs``."""
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


MIN_PART_BYTES = 64 * 2**10
"""A tensor isn't cut into parts smaller than this."""


POOL_BYTES = 64 * 2**10
"""The smallest items, up to this many bytes in all, are written by one rank, so that a reader of many small tensors
(such as optimizers' steps) opens one file."""


@dataclass(frozen=True)
class Shared:
    """A box of one tensor that several ranks hold as replicas; ``item_bytes`` is bytes per element."""

    box: Box
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.item_bytes


def share(items: Sequence[Shared], holders: int, index: int) -> list[Box | None]:
    """The part of each item that the ``index``-th of ``holders`` writes; all write about as many bytes.

    The first holder writes the smallest items, up to :data:`POOL_BYTES`. The others, laid end to end, are cut into
    ``holders`` equal lengths; a cut that falls into an item moves to its nearest row boundary. Each element has exactly
    one writer. No collective: every rank computes the same result.

    Returns:
        For each item the part that this holder writes, or None.
    """
    if holders == 1:
        return [item.box for item in items]
    cuts = _Cuts(items, holders)
    return [cuts.part(number, index) for number in range(len(items))]


def deal(items: Sequence[Shared], holders: int) -> Iterator[tuple[int, int, Box]]:
    """:func:`share` for all holders at once; yields (item number, holder index, part)."""
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
        """A range that includes all holders that have a part of an item."""
        if number in self._pooled:
            return range(1)
        first, last = (at * self._holders // self._total for at in self._positions[number : number + 2])
        return range(max(first - 1, 0), min(last + 2, self._holders))

    def part(self, number: int, index: int) -> Box | None:
        """The part of item ``number`` that holder ``index`` has, or None."""
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
        return rows_of(item.box, dim, first, last) if first < last else None


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
    """The row boundary nearest to a byte position, but none that leaves a part under :data:`MIN_PART_BYTES`."""
    row = min(max(round(nbytes / row_bytes), 0), rows)
    if 0 < row * row_bytes < MIN_PART_BYTES:
        return 0
    if 0 < (rows - row) * row_bytes < MIN_PART_BYTES:
        return rows
    return row
