"""Cuts the power after every call of a save, and asks what is left on the disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.faults.calls import met
from tests.checkpoint.faults.disk import Log, Recorder, Tree, images, put
from tests.checkpoint.faults.saves import OURS, Place, System, WrongValues, ended, forked, in_fork, join

FIRST, BESIDE, IN_NEW_FOLDERS = "last.ckpt", "last-v1.ckpt", "runs/1/last.ckpt"


@dataclass(frozen=True)
class Save:
    """A save of step 2 beside step 1, which is at ``FIRST``."""

    path: str
    world_size: int = 1
    asynchronous: bool = False
    fsync: bool = True

    def __str__(self) -> str:
        where = {FIRST: "over one", BESIDE: "to a new path", IN_NEW_FOLDERS: "to a new path in new folders"}[self.path]
        ranks = "one process" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{'asynchronous ' if self.asynchronous else ''}save {where}, {ranks}"


@dataclass
class Tried:
    """How many different images, after how many calls, and what did not hold in which."""

    images: int = 0
    calls: int = 0
    faults: list[str] = field(default_factory=list)


def recorded(scratch: Path, case: Save, system: System = OURS) -> Log:
    """The calls of a save."""
    folder = scratch / "disk"
    place = Place(str(folder), True, folder)
    folder.mkdir()
    in_fork(scratch, lambda: system.save(place, 1))
    recorder = Recorder(folder, scratch / "calls.pickle")

    def rank_saves(rank: int) -> None:
        if case.world_size > 1:
            join(rank, case.world_size, scratch / "meeting")
        with met(folder, recorder):
            path = f"{folder}/{case.path}"
            system.save(place, 2, path=path, asynchronous=case.asynchronous, fsync=case.fsync)

    pids = [forked(lambda rank=rank: rank_saves(rank)) for rank in range(case.world_size)]
    assert ended(pids) == [0] * case.world_size
    return recorder.log()


def cut_after_every_call(
    scratch: Path,
    case: Save,
    log: Log,
    *,
    system: System = OURS,
    thorough: bool = False,
    until_fault: bool = False,
    every: int = 1,
) -> Tried:
    """See what may be found after each call of the log, or after one of so many and the last."""
    tried = Tried(calls=len(log.calls))
    seen: dict[bool, set[frozenset[tuple[str, bytes | None]]]] = {False: set(), True: set()}
    for calls in range(len(log.calls) + 1):
        returned = calls == len(log.calls)
        if calls % every and not returned:
            continue
        for tree in images(log, calls, thorough=thorough):
            image = frozenset(tree.items())
            if image in seen[returned]:
                continue
            seen[returned].add(image)
            tried.images += 1
            if fault := fault_of(scratch / "image", tree, case, returned, system):
                tried.faults.append(f"after {calls} of {len(log.calls)} calls: {fault}")
                if until_fault:
                    return tried
    return tried


def fault_of(folder: Path, tree: Tree, case: Save, returned: bool, system: System) -> str:
    """What doesn't hold: step 1 or step 2 is whole; step 2 once its save has returned."""
    put(tree, folder)
    try:
        first, second = (system.step_at(str(folder / path)) for path in (FIRST, case.path))
    except (WrongValues, *system.refusals) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    if case.path != FIRST and first != 1:
        return f"step 1 is gone: {first}"
    allowed = {2} if returned else {1, 2} if case.path == FIRST else {None, 2}
    return "" if second in allowed else f"there is step {second}, and not one of {allowed}"
