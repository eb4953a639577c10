"""The processors that belong to this process: those of the machine, divided among the ranks that run on it.

A strategy lets all ranks agree on one number (:func:`shares`, :func:`agree_on`). Without one it follows from torchrun's
variables.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_agreed: list[int] = []
"""The number that ranks have agreed on; empty before."""


class Available(NamedTuple):
    """The processors that a rank may use.

    Attributes:
        machine: An id of the machine's boot, which all containers on it share.
        container: The host name.
        processors: Their numbers, ascending.
        quota: How many the container may keep busy; it may be less than one.
    """

    machine: str
    container: str
    processors: tuple[int, ...]
    quota: float

    @classmethod
    def here(cls) -> Available:
        processors = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        limit, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
        quota = int(limit) / int(period) if limit.isdecimal() and period.isdecimal() else float("inf")
        container = socket.gethostname()
        machine = _text("/proc/sys/kernel/random/boot_id") or container
        return cls(machine, container, processors or tuple(range(os.cpu_count() or 1)), quota)


def shares(ranks: Sequence[Available]) -> int:
    """The number of processors for each of several ranks, the same for all: the smallest share, and at least 1.

    A processor that several ranks may use counts for each of them in part, so it doesn't matter whether a launcher
    binds ranks to processors.
    """
    machines: defaultdict[str, list[Available]] = defaultdict(list)
    for rank in ranks:
        machines[rank.machine].append(rank)
    return max(1, int(min(map(_smallest_share, machines.values())) + 1e-6))


def _smallest_share(neighbours: Iterable[Available]) -> float:
    sets: Counter[tuple[int, ...]] = Counter()
    containers: Counter[tuple[str, float]] = Counter()
    for rank in neighbours:
        sets[rank.processors] += 1
        containers[rank.container, rank.quota] += 1
    users: Counter[int] = Counter()
    for processors, count in sets.items():
        users.update(dict.fromkeys(processors, count))
    of_processors = [sum(1 / users[processor] for processor in processors) for processors in sets]
    return min(*of_processors, *(quota / count for (_, quota), count in containers.items()))


def agree_on(number: int | None) -> None:
    """Set what :func:`share` returns; None: what the environment says."""
    _agreed[:] = [] if number is None else [number]


def share() -> int:
    """The number of processors that this process should keep busy."""
    if _agreed:
        return _agreed[0]
    here, neighbours = Available.here(), os.environ.get("LOCAL_WORLD_SIZE", "1")
    return shares([here] * max(1, int(neighbours) if neighbours.isdecimal() else 1))


def threads_by_default() -> set[int]:
    """The numbers of threads that torch may choose by itself: of all processors, or of their cores."""
    processors = Available.here().processors
    cores = {_text(f"/sys/devices/system/cpu/cpu{each}/topology/thread_siblings_list") or each for each in processors}
    return {len(processors), len(cores)}


def _text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
