"""Ways to train that take turns, step by step: what else the machine does hits neighbouring steps of all alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.steps import Watch, Way

Name = TypeVar("Name", bound=Hashable)


@dataclass
class Taken:
    """What a way's steps took on this rank, those that warm up left out.

    Attributes:
        seconds: Of each step, from when all ranks were ready for it.
        cpu_seconds: Of all threads of this process, likewise.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


class _Stopped(BaseException):
    """Another way failed."""


class _Ring:
    """Whose turn it is, of so many."""

    def __init__(self, count: int) -> None:
        self._running = [*range(count)]
        self._turn = 0
        self._changed = threading.Condition()
        self.failure: BaseException | None = None

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == number or self.failure is not None)
        if self.failure is not None:
            raise _Stopped

    def hand_on(self, number: int, *, leaves: bool = False) -> None:
        with self._changed:
            place = self._running.index(number)
            self._turn = self._running[(place + 1) % len(self._running)]
            if leaves:
                self._running.remove(number)
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Until all have left; or one has failed, and others may be anywhere."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self.failure is not None)
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()


class _Clock(Watch):
    """Takes the time of a step, then lets all others take one."""

    def __init__(self, ring: _Ring, number: int, steps: int, warmup: int) -> None:
        super().__init__(warmup + steps)
        self.taken = Taken()
        self._ring = ring
        self._number = number
        self._ended = -warmup
        self._begin()

    def ended(self, loss: Tensor | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self._ended += 1
        if self._ended > 0:
            self.taken.seconds.append(seconds)
            self.taken.cpu_seconds.append(cpu_seconds)
        self._ring.hand_on(self._number)
        self._ring.wait(self._number)
        self._begin()

    def _begin(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()


def by_turns(ways: Mapping[Name, Way], steps: int, warmup: int) -> dict[Name, Taken]:
    """Train in all ways at once, one step of each after the other. A collective call.

    Each way runs in a thread of its own, and one at a time, in this order; the first one's first step may make the
    process group.

    Args:
        steps: So many of each count.
        warmup: And so many before, at least one: that has the setup in it.
    """
    ring = _Ring(len(ways))
    taken: dict[Name, Taken] = {}

    def run(number: int, name: Name, way: Way) -> None:
        try:
            ring.wait(number)
            clock = _Clock(ring, number, steps, warmup)
            taken[name] = clock.taken
            way(clock)
            ring.hand_on(number, leaves=True)
        except _Stopped:
            pass
        except BaseException as failure:
            ring.fail(failure)

    for number, item in enumerate(ways.items()):
        threading.Thread(target=run, args=(number, *item), daemon=True).start()
    ring.wait_for_all()
    return taken
