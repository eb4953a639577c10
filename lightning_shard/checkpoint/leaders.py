"""Two-level gather: each group's leader gathers its ranks' reports and joins them; the first rank gathers the joined.

So the first rank's work grows with the number of groups, not of ranks. Up to :data:`GROUP_RANKS` ranks form one group,
led by the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_shard.checkpoint.ranks import Failure, Ranks, attempt, conclude, raised_or_given

GROUP_RANKS = 64
"""About the square root of the largest world sizes, so that both levels of the gather have about the same fan-in."""
Report = TypeVar("Report")
Joined = TypeVar("Joined")
Outcome = TypeVar("Outcome")


def exchange_by_groups(
    ranks: Ranks,
    work: Callable[[], Report],
    join: Callable[[Sequence[Report]], Joined],
    decide: Callable[[list[Joined]], Outcome],
) -> tuple[BaseException | None, Outcome | Failure]:
    """As :func:`~lightning_shard.checkpoint.ranks.exchange`, but each group's leader joins its ranks' results to one.

    Raises:
        RanksLost: A collective failed, so the outcome is unknown.
    """
    own, report = attempt(ranks, work)
    # point-to-point sends are cheap only over gloo: nccl sets up a communicator, on the device, for each pair
    several = len(ranks.members) > GROUP_RANKS and "cpu:gloo" in dist.get_backend_config(ranks.group)
    size = GROUP_RANKS if several else len(ranks.members)
    start = ranks.members.index(ranks.rank) // size * size
    reports = _to_first_of(ranks.members[start : start + size], ranks, report) if several else ranks.gather(report)
    result: Any = Failure.first(reports)
    if reports and result is None:
        fault, result = attempt(ranks, partial(join, reports))
        own = own or fault
    results = _to_first_of(ranks.members[::size], ranks, result) if several else [result] if ranks.first else []
    return conclude(ranks, own, results, decide)


def together_by_groups(
    ranks: Ranks,
    work: Callable[[], Report],
    join: Callable[[Sequence[Report]], Joined],
    decide: Callable[[list[Joined]], Outcome],
) -> Outcome:
    """As :func:`~lightning_shard.checkpoint.ranks.together`, but each group's leader joins its ranks' results."""
    return raised_or_given(ranks, *exchange_by_groups(ranks, work, join, decide))


def _to_first_of(some: Sequence[int], ranks: Ranks, value: Any) -> list[Any]:
    """Gather to the first of some ranks the values of all of them, in order; the other ranks get an empty list.

    All ranks must call it, also those that neither send nor receive: the calls are counted
    (:mod:`~lightning_shard.checkpoint.attendance`).
    """
    with ranks.talking():
        if ranks.rank == some[0]:
            received: list[list[Any]] = [[None] for _ in some[1:]]
            for source, box in zip(some[1:], received):
                dist.recv_object_list(box, src=source, group=ranks.group)
            return [value, *(box[0] for box in received)]
        if ranks.rank in some:
            dist.send_object_list([value], dst=some[0], group=ranks.group)
    return []
