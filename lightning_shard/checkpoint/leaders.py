"""Two-level gather: each group's leader gathers its ranks' reports and joins them; the first rank gathers the joined.

So the first rank's work grows with the number of groups, not of ranks. Up to :data:`GROUP_RANKS` ranks form one group,
led by the first rank.
"""

from __future__ import annotations

import itertools
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
    count: Callable[[Report], int],
    join: Callable[[Sequence[Report], int], Joined],
    decide: Callable[[list[Joined]], Outcome],
) -> tuple[BaseException | None, Outcome | Failure]:
    """As :func:`~lightning_shard.checkpoint.ranks.exchange`, but each group's leader joins its ranks' results to one.

    Args:
        count: How many items one result has, of a kind (files) that is numbered through all results in rank order.
        join: Joins a group's results; its second argument is the number of items in all groups before.

    Raises:
        RanksLost: A collective failed, so the outcome is unknown.
    """
    own, report = attempt(ranks, work)
    leaders = _Leaders(ranks)
    reports = leaders.gather(report)
    failure = Failure.first(reports)
    before = leaders.sum_before(failure or sum(map(count, reports)))
    result: Any = before
    if leaders.leads and not isinstance(before, Failure):
        fault, result = attempt(ranks, partial(join, reports, before))
        own = own or fault
    return conclude(ranks, own, leaders.bring(result), decide)


def together_by_groups(
    ranks: Ranks,
    work: Callable[[], Report],
    join: Callable[[Sequence[Report]], Joined],
    decide: Callable[[list[Joined]], Outcome],
) -> Outcome:
    """As :func:`~lightning_shard.checkpoint.ranks.together`, but each group's leader joins its ranks' results."""
    own, outcome = exchange_by_groups(ranks, work, lambda _: 0, lambda reports, _: join(reports), decide)
    return raised_or_given(ranks, own, outcome)


class _Leaders:
    """The ranks in groups, each led by its first rank.

    All ranks must call each method, also those that neither send nor receive: the calls are counted
    (:mod:`~lightning_shard.checkpoint.attendance`).
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # point-to-point sends are cheap only over gloo: nccl sets up a communicator, on the device, for each pair
        several = len(ranks.members) > GROUP_RANKS and "cpu:gloo" in dist.get_backend_config(ranks.group)
        size = GROUP_RANKS if several else len(ranks.members)
        self._leaders = ranks.members[::size]
        start = ranks.members.index(ranks.rank) // size * size
        self._group = ranks.members[start : start + size]
        self.leads = ranks.rank in self._leaders

    def gather(self, value: Any) -> list[Any]:
        """Gather to each leader the values of its group, in rank order; the other ranks get an empty list."""
        if len(self._leaders) == 1:
            return self._ranks.gather(value)
        return self._to_first_of(self._group, value)

    def bring(self, value: Any) -> list[Any]:
        """Gather the leaders' values to the first rank, in rank order; the other ranks get an empty list."""
        if len(self._leaders) == 1:
            return [value] if self.leads else []
        return self._to_first_of(self._leaders, value)

    def sum_before(self, value: int | Failure) -> int | Failure:
        """Exclusive prefix sum over the leaders: the sum before this one, or the first failure; 0 on other ranks."""
        values = self.bring(value)
        failure = Failure.first(values)
        sums = [failure] * len(values) if failure else [0, *itertools.accumulate(values)][:-1]
        if len(self._leaders) > 1:
            with self._ranks.talking():
                if self.leads and not self._ranks.first:
                    return self._receive(self._leaders[0])
                for leader, before in zip(self._leaders[1:], sums[1:]):
                    self._send(before, leader)
        return sums[0] if sums else 0

    def _to_first_of(self, some: Sequence[int], value: Any) -> list[Any]:
        with self._ranks.talking():
            if self._ranks.rank == some[0]:
                return [value, *map(self._receive, some[1:])]
            if self._ranks.rank in some:
                self._send(value, some[0])
        return []

    def _send(self, value: Any, to: int) -> None:
        dist.send_object_list([value], dst=to, group=self._ranks.group)

    def _receive(self, source: int) -> Any:
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self._ranks.group)
        return box[0]
