"""Divides replicated tensors among the ranks that hold them: each writes (or reads) about as many bytes. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_shard.checkpoint.boxes import Box, rows_of

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
