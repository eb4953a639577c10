"""Kills a save at every point, each in a run of its own, and asks what is left.

Every run is of processes that end by SIGKILL. They are forked from one that has imported everything and does nothing
else, so that a point costs a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.faults.calls import Counting, KillAt, Moment, met, moments, requests_met
from tests.checkpoint.faults.saves import (
    FIRST,
    Place,
    Save,
    Tried,
    age,
    ended,
    fault_of,
    forked,
    in_fork,
    join,
    save,
)
from tests.servers import BUCKET, Server, let_servers_forget

KILLED = -9


@dataclass
class Ground:
    """Where saves are killed: a folder of the disk, and how a store names it."""

    scratch: Path
    server: Server | None = None
    runs: int = 0

    def __post_init__(self) -> None:
        base = self._place("base", FIRST)
        in_fork(self.scratch, lambda: save(base, 1))
        age(base.on_disk)

    @property
    def counted(self) -> Path:
        """Where the victim keeps the names of its calls."""
        return self.scratch / "calls.json"

    def fresh(self, name: str) -> Place:
        """A folder with a checkpoint of step 1."""
        self.runs += 1
        place = self._place(f"run-{self.runs}", name)
        shutil.copytree(self._place("base", name).on_disk, place.on_disk)
        if self.server:
            let_servers_forget()
        return place

    def _place(self, folder: str, name: str) -> Place:
        if self.server:
            on_disk = self.server.folder / BUCKET / folder
            return Place(f"{self.server.url}/{folder}", name, on_disk, self.server.options)
        return Place(str(self.scratch / folder), name, self.scratch / folder)


def kill_at_every_point(ground: Ground, case: Save, limit: int | None = None) -> Tried:
    """Kill at every call that the victim makes, or at so many of them, and see what is left."""
    assert ended(started(ground, ground.fresh(case.name), case, None)) == [0] * case.world_size
    tried = Tried()
    for moment in spread(moments(json.loads(ground.counted.read_text())), limit):
        place = ground.fresh(case.name)
        codes = ended(started(ground, place, case, moment))
        fault = in_fork(ground.scratch, lambda place=place: fault_of(place))
        if case.world_size > 1 and codes == [0] * case.world_size:
            continue  # ranks race to make the folders: this time, the victim had fewer calls to make
        if codes[case.victim or 0] != KILLED or None in codes:
            fault = f"the ranks ended with {codes}; {fault}"
        tried.points += 1
        tried.faults += [f"{moment}: {fault}"] if fault else []
        shutil.rmtree(place.on_disk)
    return tried


def spread(points: list[Any], limit: int | None) -> list[Any]:
    """So many of them, evenly, from the first to the last; all where there is no limit."""
    if limit is None or limit >= len(points):
        return points
    return [points[index * (len(points) - 1) // (limit - 1)] for index in range(limit)]


def started(ground: Ground, place: Place, case: Save, moment: Moment | None) -> list[int]:
    """The ranks' processes; without a moment, nobody is killed, and the victim's calls are counted."""
    pids: dict[int, int] = {}
    meeting = ground.scratch / f"meeting-{ground.runs}"
    victim = case.victim or 0
    for rank in sorted(range(case.world_size), key=lambda rank: rank == victim):  # the victim knows the others

        def work(rank: int = rank, others: tuple[int, ...] = tuple(pids.values())) -> None:
            counting = Counting()
            killing = KillAt(moment, others if case.everyone else ()) if moment and rank == victim else None
            if case.world_size > 1:
                join(rank, case.world_size, meeting)
            with watched(place, killing or counting):
                save(place, 2, asynchronous=case.asynchronous)
            if rank == victim:
                ground.counted.write_text(json.dumps(counting.names))

        pids[rank] = forked(work)
    return [pids[rank] for rank in range(case.world_size)]


@contextlib.contextmanager
def watched(place: Place, handler: Counting | KillAt) -> Iterator[None]:
    with requests_met(handler.request) if place.options else met(place.folder, handler):
        yield
