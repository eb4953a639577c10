"""Ranks that work together: what one knows, all know; where one fails, all stop with the first cause."""

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
    """Another rank failed to save or load its part, or didn't come to do so."""


class RanksLost(RankCheckpointFailure):
    """The ranks can't talk any more, so what the others know is unknown."""


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together; one alone where there is no process group."""

    rank: int = 0
    members: tuple[int, ...] = (0,)
    group: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Those of ``group``, by default of the whole world."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        group = group if group is not None else dist.group.WORLD
        return cls(dist.get_rank(), tuple(dist.get_process_group_ranks(group)), group)

    @property
    def first(self) -> bool:
        return self.rank == self.members[0]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on the first rank; elsewhere nothing."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * len(self.members)
        with self.talking():
            dist.gather_object(value, values if self.first else None, dst=self.members[0], group=self.group)
        return values if self.first else []

    def broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        if self.alone:
            return value
        box = [value]
        with self.talking():
            dist.broadcast_object_list(box, src=self.members[0], group=self.group)
        return box[0]

    def any(self, *values: bool) -> list[bool]:
        """Of each value, whether it is true on some rank: one round, where objects take four."""
        if self.alone:
            return list(values)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else None
        flags = torch.tensor(values, dtype=torch.int32, device=device)
        with self.talking():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Run a collective of the group; if ranks are lost in it, say which.

        Raises:
            RanksLost: The connection to a rank was lost, or the group's timeout is over.
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
                f"The ranks that save or load together lost each other: {attendance.account()}. Rank {self.rank} was"
                f" told: {error}"
            ) from error


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks."""

    rank: int
    kind: str
    message: str
    files_stay: bool = False
    """Whether what was being committed may have become the checkpoint all the same."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        return cls(rank, type(error).__name__, str(error) or type(error).__name__)

    @classmethod
    def first(cls, reports: Iterable[Any]) -> Failure | None:
        """That of the first rank among those that failed, if any did."""
        return next((report for report in reports if isinstance(report, Failure)), None)

    def raise_here(self, rank: int) -> None:
        """Raise it on a rank that didn't fail itself: as the same error of ours, so that every rank can catch it."""
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
    """Do each rank's work, and on the first rank what follows from all their results; a collective call.

    Returns:
        This rank's own error, and on every rank what the first one decided, or what failed first.

    Raises:
        RanksLost: They could not talk to the end.
    """
    own, report = attempt(ranks, work)
    return conclude(ranks, own, ranks.gather(report), decide)


def attempt(ranks: Ranks, work: Callable[[], Result]) -> tuple[BaseException | None, Result | Failure]:
    """This rank's own error, and what its work gave, or the error as it travels."""
    try:
        return None, work()
    except BaseException as error:
        return error, Failure.of(ranks.rank, error)


def conclude(
    ranks: Ranks, own: BaseException | None, reports: list[Any], decide: Callable[[list[Result]], Outcome]
) -> tuple[BaseException | None, Outcome | Failure]:
    """The end of an exchange: the first rank decides on the reports, which it alone has, and all are told."""
    outcome: Any = None
    if ranks.first:
        outcome = Failure.first(reports)
        if outcome is None:
            own, outcome = attempt(ranks, lambda: decide(reports))
    return own, ranks.broadcast(outcome)


def together(ranks: Ranks, work: Callable[[], Result], decide: Callable[[list[Result]], Outcome]) -> Outcome:
    """The same, raising what failed: the ranks that failed raise their own error, the others that of the first one."""
    return raised_or_given(ranks, *exchange(ranks, work, decide))


def raised_or_given(ranks: Ranks, own: BaseException | None, outcome: Outcome | Failure) -> Outcome:
    """What an exchange has come to: its outcome, or on all ranks the error."""
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
    """Whether all ranks that work together raise at this moment, so that a collective may follow.

    Also where a rank raises another error from the one that it was told: those that had no such error do not.
    """
    known: BaseException | None = error
    while known is not None and not getattr(known, _RAISED_BY_ALL, False):
        known = known.__cause__
    return known is not None


@dataclass
class Vote:
    """``yes`` may be set on any rank while a block runs. If that succeeds, it is then true on all if it was on one."""

    yes: bool = False


@contextlib.contextmanager
def all_or_none(group: Any = None) -> Iterator[Vote]:
    """Run a block on every rank of a group; if it fails on one, every rank raises. A collective call.

    The failing ranks raise their own error; the others the one of the first rank that failed.
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
