"""Collectives for ranks that save or load together, and errors that reach every rank.

Each exchange gathers every rank's result, or its failure, to the first rank, which decides and broadcasts the outcome.
A failed rank takes part like any other, so no rank waits for it: all ranks raise, with the first failure as the cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_shard import errors
from lightning_shard.errors import CheckpointError, RankFailure, ShardError


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
        """The ranks of ``group``; by default, of the whole world.

        Raises:
            CheckpointError: This rank isn't one of them.
        """
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
        from lightning_shard.checkpoint.attendance import Attendance

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
    ranks: Ranks, work: Callable[[], Result], decide: Callable[[list[Result]], Outcome]
) -> tuple[BaseException | None, Outcome | Failure]:
    """Run ``work`` on each rank, then ``decide`` on the first rank with all results. A collective call.

    Returns:
        This rank's own error, if any; and, the same on every rank, the first rank's decision or the first failure.

    Raises:
        RanksLost: A collective failed, so the outcome is unknown.
    """
    own, report = attempt(ranks, work)
    return conclude(ranks, own, ranks.gather(report), decide)


def attempt(ranks: Ranks, work: Callable[[], Result]) -> tuple[BaseException | None, Result | Failure]:
    """Run ``work``; returns (None, result), or the error and the :class:`Failure` to send."""
    try:
        return None, work()
    except BaseException as error:
        return error, Failure.of(ranks.rank, error)


def conclude(
    ranks: Ranks, own: BaseException | None, reports: list[Any], decide: Callable[[list[Result]], Outcome]
) -> tuple[BaseException | None, Outcome | Failure]:
    """Second half of an exchange: the first rank, which alone has the reports, decides and broadcasts the outcome."""
    outcome: Any = None
    if ranks.first:
        outcome = Failure.first(reports)
        if outcome is None:
            own, outcome = attempt(ranks, lambda: decide(reports))
    return own, ranks.broadcast(outcome)


def together(ranks: Ranks, work: Callable[[], Result], decide: Callable[[list[Result]], Outcome]) -> Outcome:
    """:func:`exchange` that raises on failure: failed ranks raise their own error, the others the first failure."""
    return raised_or_given(ranks, *exchange(ranks, work, decide))


def raised_or_given(ranks: Ranks, own: BaseException | None, outcome: Outcome | Failure) -> Outcome:
    """Return the outcome of an exchange, or raise on all ranks."""
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
