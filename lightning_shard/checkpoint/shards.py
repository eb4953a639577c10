"""From a DTensor's placements to the boxes that a rank holds: plain integer arithmetic, no torch, no I/O.

Terms: a *run* is a half-open interval of indices along one dim; a *box* is one run per dim. A rank's local tensor is
the product, over dims, of one list of runs each; the rows of the local tensor are the runs' indices in order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_shard.checkpoint.boxes import Box

Run = tuple[int, int]
Runs = tuple[Run, ...]


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
