"""Pipeline schedules: the order of actions on each rank, and the rules for an order that can run.

Pure. A network is cut into stages, one or several on each rank, and a batch into microbatches. ``2F5`` is the forward
of stage 2 on microbatch 5, in the notation of ``torch.distributed.pipelining``. A backward is one action ``B``, or two:
``I`` computes the gradients of the stage's inputs, which the previous stage waits for; ``W`` computes the gradients of
its weights, which no stage waits for. Dependencies, for stage *s* and microbatch *m*::

    sFm   needs (s−1)Fm
    sBm   needs sFm, and (s+1)Bm or (s+1)Im; so does sIm
    sWm   needs sIm

``named.py`` builds the schedules that have names.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple

from lightning_shard.errors import ConfigurationError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def gives(self) -> tuple[Action, ...]:
        """The dependencies that this action satisfies: a whole backward satisfies those on both of its parts."""
        if self.kind == "B":
            return Action(self.stage, "I", self.microbatch), Action(self.stage, "W", self.microbatch)
        return (self,)

    def needs(self, stages: int) -> tuple[Action, ...]:
        """The actions that this one depends on, as :meth:`gives` lists them."""
        stage, kind, microbatch = self
        if kind == "W":
            return (Action(stage, "I", microbatch),)
        if kind == "F":
            return (Action(stage - 1, "F", microbatch),) if stage else ()
        forward = Action(stage, "F", microbatch)
        return (forward, Action(stage + 1, "I", microbatch)) if stage + 1 < stages else (forward,)


Row = tuple[Action, ...]


class Placed(NamedTuple):
    """An action in the global order of all ranks: its rank, and the indices of its dependencies in that order."""

    rank: int
    action: Action
    needs: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The order of actions on every rank of a pipeline. The last rank holds the last stage.

    Attributes:
        name: The name that a user gives, or the path of a CSV file.
        rows: The actions of each rank, in order.
    """

    name: str
    rows: tuple[Row, ...]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that holds each stage."""
        return {action.stage: rank for rank, row in enumerate(self.rows) for action in row}

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in network order."""
        return sorted(stage for stage, holder in self.rank_of.items() if holder == rank)

    @cached_property
    def splits_backwards(self) -> bool:
        return any(action.kind == "W" for row in self.rows for action in row)

    def with_whole_backwards(self) -> Schedule:
        """The same order with whole backwards: each ``I`` becomes a ``B``, and each ``W`` is left out."""

        def whole(row: Row) -> Row:
            return tuple(a._replace(kind="B") if a.kind == "I" else a for a in row if a.kind != "W")

        return Schedule(self.name, tuple(map(whole, self.rows)))

    def first(self, microbatches: int) -> Schedule:
        """The same order restricted to the first microbatches: an epoch's last batch may have fewer.

        It can run if this one can, since an action depends only on actions of its own microbatch.
        """
        return self if microbatches >= self.microbatches else _first(self, microbatches)

    def in_flight(self, rank: int, stage: int | None = None, until: str = "BW") -> int:
        """The largest number of forwards whose activations a rank keeps at once, over all of its stages or of one.

        Activations are kept until the weight gradients are computed (``B`` or ``W``), or ``until`` other actions.
        """
        row = (action.kind for action in self.rows[rank] if stage in (None, action.stage))
        return max(accumulate((kind == "F") - (kind in until) for kind in row), default=0)

    @cached_property
    def order(self) -> tuple[Placed, ...]:
        """A topological order of all ranks' actions, which keeps the order of each rank.

        Raises:
            ConfigurationError: Ranks would deadlock.
        """
        placed: list[Placed] = []
        givers: dict[Action, int] = {}
        for rank, action in self.walk():
            placed.append(Placed(rank, action, tuple(givers[need] for need in action.needs(self.stages))))
            givers.update(dict.fromkeys(action.gives(), len(placed) - 1))
        return tuple(placed)

    def walk(self) -> Iterator[tuple[int, Action]]:
        """Yield the ranks and actions of :attr:`order`, up to a deadlock.

        Raises:
            ConfigurationError: Ranks would deadlock.
        """
        stages = self.stages
        done: set[Action] = set()
        waiting = [deque(row) for row in self.rows]
        asleep: dict[Action, list[int]] = {}  # blocked ranks, by the action that they wait for
        awake = deque(range(len(waiting)))
        while awake:
            rank = awake.popleft()
            row = waiting[rank]
            while row:
                missing = next((need for need in row[0].needs(stages) if need not in done), None)
                if missing is not None:
                    asleep.setdefault(missing, []).append(rank)
                    break
                action = row.popleft()
                for given in action.gives():
                    done.add(given)
                    awake.extend(asleep.pop(given, ()))
                yield rank, action
        if any(waiting):
            raise self._broken(
                "its ranks would wait for each other, " + "; ".join(_stuck(waiting, done, stages)),
                "let an action come after what it needs, also where that is on other ranks",
            )

    def check(self) -> None:
        """Check that the runtime can run this order, and would compute what a single process computes.

        Raises:
            ConfigurationError: Names the first violated rule, and where.
        """
        self._check_stages()
        self._check_counts()
        for _ in self.walk():
            pass
        self._check_links()

    def _check_stages(self) -> None:
        if not self.rank_of:
            raise self._broken("it has no actions", "write a row for each rank")
        for rank, row in enumerate(self.rows):
            if not row:
                raise self._broken(f"rank {rank} has no actions", "give each rank a row with a stage of its own")
            for action in row:
                if self.rank_of[action.stage] != rank:
                    raise self._broken(
                        f"stage {action.stage} is on rank {rank} and on rank {self.rank_of[action.stage]}",
                        "give each stage to one rank",
                    )
        if set(self.rank_of) != set(range(self.stages)):
            raise self._broken(
                f"its stages are {sorted(self.rank_of)}", f"number {self.stages} stages from 0 to {self.stages - 1}"
            )
        if self.rank_of[self.stages - 1] != len(self.rows) - 1:
            raise self._broken(
                f"its last stage ({self.stages - 1}) is on rank {self.rank_of[self.stages - 1]} of {len(self.rows)}",
                "put it on the last rank, or on the first, as V-shaped schedules do",
            )

    def _check_counts(self) -> None:
        """Each forward and backward part runs once. A stage's forwards ascend: losses are weighted in that order."""
        done: set[Action] = set()
        for row in self.rows:
            for action in row:
                for part in action.gives():
                    if part in done:
                        raise self._broken(f"it runs {part} twice", "have each forward and backward once")
                    done.add(part)
                before = action._replace(microbatch=action.microbatch - 1)
                if action.kind == "F" and action.microbatch and before not in done:
                    raise self._broken(f"{action} runs before {before}", "run a stage's forwards in ascending order")
        for stage in range(self.stages):
            for microbatch in range(self.microbatches):
                for kind in ("F", "I", "W"):
                    if Action(stage, kind, microbatch) not in done:
                        also = "" if kind == "F" else f", nor {stage}B{microbatch}"
                        raise self._broken(
                            f"it lacks {stage}{kind}{microbatch}{also}",
                            f"have a forward and a backward (B, or I and W) for each of {self.stages} stages and"
                            f" {self.microbatches} microbatches",
                        )

    def _check_links(self) -> None:
        """On each link, the receive order equals the send order: messages carry no tags."""
        for kinds, step in (("F", 1), ("BI", -1)):
            sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
            received: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for rank, row in enumerate(self.rows):
                for stage, kind, microbatch in row:
                    if kind not in kinds:
                        continue
                    to, source = self.rank_of.get(stage + step), self.rank_of.get(stage - step)
                    if to not in (None, rank):
                        sent.setdefault((rank, to), []).append((stage, microbatch))
                    if source not in (None, rank):
                        received.setdefault((source, rank), []).append((stage - step, microbatch))
            for link, messages in sent.items():
                for one, other in zip(messages, received[link], strict=True):
                    if one != other:
                        what = "gradients" if step < 0 else "values"
                        raise self._broken(
                            f"rank {link[1]} takes {what} of stage {other[0]}, microbatch {other[1]} from rank"
                            f" {link[0]} where that sends those of stage {one[0]}, microbatch {one[1]}",
                            "let the receiving rank run what depends on them in the order in which they are sent",
                        )

    def _broken(self, what: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"schedule={self.name!r} can't be run: {what}; {remedy}.")


def _stuck(waiting: Sequence[Sequence[Action]], done: set[Action], stages: int) -> Iterator[str]:
    for rank, row in enumerate(waiting):
        if row:
            missing = [str(need) for need in row[0].needs(stages) if need not in done]
            yield f"rank {rank} at {row[0]} for {' and '.join(missing)}"


@lru_cache(maxsize=8)  # a plan simulates the same order again, and orders keep what was computed of them
def _first(schedule: Schedule, microbatches: int) -> Schedule:
    rows = (tuple(action for action in row if action.microbatch < microbatches) for row in schedule.rows)
    return Schedule(schedule.name, tuple(rows))


# -- as a file --------------------------------------------------------------------------------------------------------

_COMPUTES = re.compile(r"(\d+)([FBIW])(\d+)")
_IMPLIED_BY_ORDER = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_csv(path: str) -> Schedule:
    """Read an order from a CSV file in the format of torch's schedules (``_dump_csv``, ``_load_csv``).

    The file has one row per rank and one action per cell: ``0F0``, ``3B1``, ``3I1``, ``3W1``. Empty cells are idle
    time. The parts of ``(0F4;3B0)OVERLAP_F_B`` run one after the other. Cells that send, receive, unshard, reshard or
    reduce are ignored: here the order of the computations decides when that happens.

    Raises:
        ConfigurationError: The file can't be read, or its order can't run; says what and where.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            cells = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"schedule={path!r} can't be read ({error}): give the path of a CSV file.") from error
    rows = [
        tuple(action for column, cell in enumerate(row) for action in _actions(cell, path, line, column))
        for line, row in enumerate(cells)
    ]
    if rows and rows[0] and max(rows[0]).stage == max(chain(*rows)).stage:
        rows.reverse()  # a V whose first row, not its last, has the first and the last stage
    schedule = Schedule(path, tuple(rows))
    schedule.check()
    return schedule


def to_csv(schedule: Schedule) -> str:
    """The CSV text, which :func:`read_csv` and torch can read."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


def _actions(cell: str, path: str, line: int, column: int) -> list[Action]:
    text = cell.strip()
    if overlapped := _OVERLAPPED.fullmatch(text):
        return [action for part in overlapped[1].split(";") for action in _actions(part, path, line, column)]
    if found := _COMPUTES.fullmatch(text):
        return [Action(int(found[1]), found[2], int(found[3]))]  # type: ignore[arg-type]
    if text and not _IMPLIED_BY_ORDER.fullmatch(text):
        raise ConfigurationError(
            f"schedule={path!r} has {text!r} in row {line}, column {column}: write the stage, F, B, I or W, and the"
            " microbatch, such as 0F3."
        )
    return []
