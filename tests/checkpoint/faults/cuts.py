"""Cuts the power after every call of a save, and asks what is left on the disk."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.checkpoint.faults.calls import met
from tests.checkpoint.faults.disk import Log, Recorder, Tree, images, put
from tests.checkpoint.faults.saves import (
    FIRST,
    REFUSALS,
    Place,
    Save,
    Tried,
    ended,
    forked,
    in_fork,
    join,
    save,
    step_at,
)


def recorded(scratch: Path, case: Save) -> Log:
    """The calls of a save."""
    folder = scratch / "disk"
    place = Place(str(folder), case.name, folder)
    folder.mkdir()
    in_fork(scratch, lambda: save(replace(place, name=FIRST), 1))
    recorder = Recorder(folder, scratch / "calls.pickle")

    def rank_saves(rank: int) -> None:
        if case.world_size > 1:
            join(rank, case.world_size, scratch / "meeting")
        with met(folder, recorder):
            save(place, 2, asynchronous=case.asynchronous, fsync=case.fsync)

    pids = [forked(lambda rank=rank: rank_saves(rank)) for rank in range(case.world_size)]
    assert ended(pids) == [0] * case.world_size
    return recorder.log()


def cut_after_every_call(
    scratch: Path, case: Save, log: Log, *, thorough: bool = False, until_fault: bool = False, every: int = 1
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
            tried.points += 1
            if fault := fault_of(scratch / "image", tree, case, returned):
                tried.faults.append(f"after {calls} of {len(log.calls)} calls: {fault}")
                if until_fault:
                    return tried
    return tried


def fault_of(folder: Path, tree: Tree, case: Save, returned: bool) -> str:
    """What doesn't hold: step 1 or step 2 is whole; step 2 once its save has returned."""
    put(tree, folder)
    try:
        first, second = (step_at(str(folder / path)) for path in (FIRST, case.name))
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    if case.name != FIRST and first != 1:
        return f"step 1 is gone: {first}"
    allowed = {2} if returned else {1, 2} if case.name == FIRST else {None, 2}
    return "" if second in allowed else f"there is step {second}, and not one of {allowed}"
