"""Contenders timed in turn, in the same processes: whatever else the machine does hits all alike."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.state import State

TIMEOUT_S = 900.0
"""For one set of processes, which measures all contenders in all rounds."""


@dataclass
class Task:
    """What a contender is to do once.

    Attributes:
        state: To be saved, or loaded into.
        folder: An empty one to save to, or what the same contender's writer has written; on all ranks the same.
        fsync: Whether what is written must be on the disk at the end.
        storage_options: For fsspec.
        afterwards: Run when the time has been taken.
    """

    state: State
    folder: str
    fsync: bool = False
    storage_options: dict[str, Any] = field(default_factory=dict)
    afterwards: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


Contender = Callable[[Task], None]


@dataclass
class Timed:
    """Seconds per round, of the slowest rank, by contender; and why a contender couldn't take part."""

    seconds: dict[str, list[float]]
    skipped: dict[str, str]

    def only(self, names: Iterable[str]) -> Timed:
        """Of these contenders, in their order."""
        names = list(names)
        seconds = {name: self.seconds[name] for name in names if name in self.seconds}
        return Timed(seconds, {name: self.skipped[name] for name in names if name in self.skipped})


def in_turn(
    contenders: Mapping[str, Contender],
    rounds: int,
    task_of: Callable[[str], Task],
    *,
    task_of_first: Callable[[str], Task] | None = None,
    check: Callable[[str, Task], None] = lambda name, task: None,
) -> Timed:
    """Time all contenders once in every round, the first of a round being another one each time. A collective call.

    A first round isn't counted: it warms up, its results are checked, and who fails in it takes no further part.

    Args:
        task_of: Prepares a contender's next task; not timed.
        task_of_first: The same for the first round.
        check: Raises if the outcome of the first round isn't right; not timed.
    """
    timed = Timed({}, {})
    for name, contender in contenders.items():
        task = (task_of_first or task_of)(name)
        reason = None
        try:
            with task.afterwards:
                contender(task)
            check(name, task)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reasons = [reason for reason in everyone(reason) if reason is not None]
        if reasons:
            timed.skipped[name] = reasons[0]
        else:
            timed.seconds[name] = []
    names = list(timed.seconds)
    # what is here stays; to look through all of it takes a second
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            task = task_of(name)
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            with task.afterwards:
                contenders[name](task)
                taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            timed.seconds[name].append(float(taken))
    return timed


def everyone(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def quiet() -> None:
    """Keep the contenders' advice to themselves."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


@contextlib.contextmanager
def fresh_folders(root: str) -> Iterator[Callable[[], str]]:
    """Gives an empty folder at every call, the same on all ranks, after the one before it has been removed."""
    current = Path(root, "current")

    def clear() -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(current, ignore_errors=True)

    def fresh() -> str:
        clear()
        if dist.get_rank() == 0:
            current.mkdir(parents=True)
        dist.barrier()
        return str(current)

    yield fresh
    clear()
