"""Computes from a DTensor's placements the boxes that a rank holds: plain integer arithmetic, no torch, no I/O.

Terms: a *run* is a half-open interval of indices along one dim; a *box* is one run per dim. A rank's local tensor is
the Cartesian product, over dims, of one list of runs each; its rows along a dim are the runs' indices in order.
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
