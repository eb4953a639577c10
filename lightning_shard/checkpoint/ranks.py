"""Collectives for ranks that save or load together, and errors that reach every rank.

Each exchange gathers every rank's result, or its failure, to the first rank, which decides and broadcasts the outcome.
A failed rank takes part like any other, so no rank waits for it: all ranks raise, with the first failure as the cause.

gloo reports that a connection was closed or timed out, but not which rank caused it. So each rank counts the exchanges
that it joins, in the process group's store. When an exchange fails, the others read these counts.

Private part of torch 2.11 to 2.14: ``distributed_c10d._get_process_group_store``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_shard import errors
from lightning_shard.errors import CheckpointError, RankFailure, ShardError

GROUP_RANKS = 64
"""About the square root of the largest world sizes, so that both levels of a gather have about the same fan-in."""


class RankCheckpointFailure(RankFailure, CheckpointError):
    """Another rank failed to save or load its part, or never joined the collective."""


class RanksLost(RankCheckpointFailure):
    """Communication between the ranks broke down, so this rank doesn't know the others' outcome."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together; a single one where there is no process group."""

    rank: int = 0
    members: tuple[int, ...] = (0,)
    group: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """The ranks of ``group``; by default, of the whole world."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise CheckpointError(f"Rank {dist.get_rank()} isn't in group: call this on the ranks of the group only.")
        group = group if group is not None else dist.group.WORLD
        return cls(dist.get_rank(), tuple(dist.get_process_group_ranks(group)), group)

    @property
    def first(self) -> bool:
        return self.rank == self.members[0]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's value to the first rank, in rank order; the other ranks get an empty list."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * len(self.members)
        with self.talking():
            dist.gather_object(value, values if self.first else None, dst=self.members[0], group=self.group)
        return values if self.first else []

    def broadcast(self, value: Any) -> Any:
        """Broadcast the first rank's value."""
        if self.alone:
            return value
        box = [value]
        with self.talking():
            dist.broadcast_object_list(box, src=self.members[0], group=self.group)
        return box[0]

    def any(self, *values: bool) -> list[bool]:
        """For each value, whether it is true on any rank. One all-reduce, where exchanging objects takes four."""
        if self.alone:
            return list(values)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else None
        flags = torch.tensor(values, dtype=torch.int32, device=device)
        with self.talking():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Context for one collective of the group: if it fails, the error names the ranks that didn't join it.

        Raises:
            RanksLost: The connection to a rank was lost, or the group's timeout expired.
        """
        attendance = Attendance.of(self.group, self.rank, self.members)
        attendance.come()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ShardError):
                raise
            raise RanksLost(
                f"A collective of the ranks that save or load together failed: {attendance.account()}. Rank {self.rank}"
                f" got: {error}"
            ) from error


FILES_STAY = "_lightning_shard_files_stay"
"""Attribute of an error: whether the commit may have succeeded despite it."""


@dataclass(frozen=True)
class Failure:
    """An error in the form that is sent between ranks."""

    rank: int
    kind: str
    message: str
    files_stay: bool = False
    """Whether the files must be kept, since the commit may have succeeded despite the error."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        return cls(rank, type(error).__name__, str(error) or type(error).__name__, getattr(error, FILES_STAY, False))

    @classmethod
    def first(cls, reports: Iterable[Any]) -> Failure | None:
        """The failure of the first failed rank, or None if no rank failed."""
        return next((report for report in reports if isinstance(report, Failure)), None)

    def raise_here(self, rank: int) -> None:
        """Raise the error on a rank that didn't fail itself.

        An error class of :mod:`lightning_shard.errors` stays the same class, so that every rank can catch it alike.
        """
        kind = getattr(errors, self.kind, None)
        ours = isinstance(kind, type) and issubclass(kind, CheckpointError)
        text = self.message if ours else f"{self.kind}: {self.message}"
        prefix = f"rank {self.rank}: " if rank != self.rank else ""
        raise (kind if ours and kind is not None else RankCheckpointFailure)(prefix + text)


_RAISED_BY_ALL = "_lightning_shard_raised_by_all"
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")


def exchange(
    ranks: Ranks,
    work: Callable[[], Any],
    decide: Callable[[list[Any]], Outcome],
    join: Callable[[Sequence[Any]], Any] | None = None,
) -> tuple[BaseException | None, Outcome | Failure]:
    """Run ``work`` on each rank, then ``decide`` on the first rank with all results. A collective call.

    Args:
        join: Joins the results of a group of up to :data:`GROUP_RANKS` ranks on the group's leader; ``decide`` gets
            what was joined. So the first rank's work grows with the number of groups.

    Returns:
        This rank's own error, if any; and, the same on every rank, the first rank's decision or the first failure.

    Raises:
        RanksLost: A collective failed, so the outcome is unknown.
    """
    own, report = _attempt(ranks, work)
    # point-to-point sends are cheap only over gloo: nccl sets up a communicator, on the device, for each pair
    several = join is not None and len(ranks.members) > GROUP_RANKS
    if several := several and "cpu:gloo" in dist.get_backend_config(ranks.group):
        start = ranks.members.index(ranks.rank) // GROUP_RANKS * GROUP_RANKS
        reports = _to_first_of(ranks.members[start : start + GROUP_RANKS], ranks, report)
    else:
        reports = ranks.gather(report)
    if join is not None:
        result: Any = Failure.first(reports)
        if reports and result is None:
            fault, result = _attempt(ranks, partial(join, reports))
            own = own or fault
        reports = _to_first_of(ranks.members[::GROUP_RANKS], ranks, result) if several else [result]
    outcome: Any = None
    if ranks.first:
        outcome = Failure.first(reports)
        if outcome is None:
            own, outcome = _attempt(ranks, lambda: decide(reports))
    return own, ranks.broadcast(outcome)


def _attempt(ranks: Ranks, work: Callable[[], Result]) -> tuple[BaseException | None, Result | Failure]:
    """Run ``work``; returns (None, result), or the error and the :class:`Failure` to send."""
    try:
        return None, work()
    except BaseException as error:
        return error, Failure.of(ranks.rank, error)


def together(
    ranks: Ranks,
    work: Callable[[], Any],
    decide: Callable[[list[Any]], Outcome],
    join: Callable[[Sequence[Any]], Any] | None = None,
) -> Outcome:
    """:func:`exchange` that raises on failure: failed ranks raise their own error, the others the first failure."""
    own, outcome = exchange(ranks, work, decide, join)
    try:
        if own is not None:
            raise own
        if isinstance(outcome, Failure):
            outcome.raise_here(ranks.rank)
    except BaseException as error:
        setattr(error, _RAISED_BY_ALL, True)
        raise
    return outcome  # type: ignore[return-value]


def raised_by_all(error: BaseException) -> bool:
    """Whether all ranks raise at this point, so that a collective may follow.

    Also true where a rank wraps the shared error in another one (``raise … from``), which the other ranks don't.
    """
    known: BaseException | None = error
    while known is not None and not getattr(known, _RAISED_BY_ALL, False):
        known = known.__cause__
    return known is not None


@dataclass
class Vote:
    """A flag that is or-reduced: any rank may set ``yes`` in the block; if the block succeeds, all ranks see it."""

    yes: bool = False


@contextlib.contextmanager
def all_or_none(group: Any = None) -> Iterator[Vote]:
    """Run a block on every rank of a group; if it fails on one, every rank raises. A collective call.

    The failing ranks raise their own error, the others that of the first rank that failed.
    """
    own: list[BaseException] = []
    vote = Vote()
    try:
        yield vote
    except BaseException as error:
        own.append(error)

    def fail() -> None:
        if own:
            raise own[0]

    ranks = Ranks.of(group)
    failed, vote.yes = ranks.any(bool(own), vote.yes)
    if failed:
        together(ranks, fail, lambda _: None)


GRACE_S = 1.0
"""Time for slower ranks to join before the counts are read."""
ANSWER_S = 5.0
"""Limit for reading the store, which may live in the process that has ended or is stopped."""
_PREFIX = "lightning_shard/exchanges"

_of_groups: WeakKeyDictionary[Any, Attendance] = WeakKeyDictionary()


class Attendance:
    """Counts of the exchanges that each rank of one process group has joined."""

    def __init__(self, group: Any, rank: int, members: Sequence[int]) -> None:
        self._store = distributed_c10d._get_process_group_store(group)  # None for some backends, such as MPI
        self._lost = False
        self._rank = rank
        self._members = members
        self._count = 0

    @classmethod
    def of(cls, group: Any, rank: int, members: Sequence[int]) -> Attendance:
        known = _of_groups.get(group)
        if known is None:
            known = _of_groups[group] = cls(group, rank, members)
        return known

    def come(self) -> None:
        """Record that this rank joins the next exchange; doesn't wait for the others."""
        self._count += 1
        if self._store is None or self._lost:
            return  # a store that failed to answer once may block the next caller
        with contextlib.suppress(RuntimeError):  # the exchange itself will raise
            self._store.set(f"{_PREFIX}/{self._rank}", str(self._count))

    def account(self) -> str:
        """After a failed exchange: a text that says which ranks didn't join it, as far as that can be known."""
        if self._store is None:
            return "which ranks are missing isn't known"
        self._lost = True
        counts: dict[int, int] = {}
        thread = threading.Thread(target=self._read, args=(counts,), daemon=True)
        thread.start()
        thread.join(GRACE_S + ANSWER_S)
        if len(counts) < len(self._members):
            return "the process that holds the process group's store (mostly rank 0) is gone or doesn't answer"
        fewest = min(counts.values())
        absent = [rank for rank, count in counts.items() if count == fewest]
        if fewest >= self._count:
            return "all ranks joined the collective, and the connection to one broke during it"
        named = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
        if len(absent) == 1:
            return f"rank {named} didn't join the collective: it has ended, was stopped, or hangs"
        return f"ranks {named} didn't join the collective: they have ended, were stopped, or hang"

    def _read(self, counts: dict[int, int]) -> None:
        threading.Event().wait(GRACE_S)
        try:
            for rank in self._members:
                key = f"{_PREFIX}/{rank}"
                counts[rank] = int(self._store.get(key)) if self._store.check([key]) else 0
        except RuntimeError:
            counts.clear()


def _to_first_of(some: Sequence[int], ranks: Ranks, value: Any) -> list[Any]:
    """Gather to the first of some ranks the values of all of them, in order; the other ranks get an empty list.

    All ranks must call it, also those that neither send nor receive: the calls are counted.
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
