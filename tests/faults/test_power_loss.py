"""The power is cut after any call of a save, and the disk keeps what was synced and anything of the rest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from tests.faults.calls import met
from tests.faults.disk import Log, Node, Recorder, Tree, images, put
from tests.faults.saves import OURS, Place, System, WrongValues, ended, forked, in_fork, join

LIMIT_S = 1200.0
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
    scratch: Path, case: Save, log: Log, *, system: System = OURS, thorough: bool = False
) -> Tried:
    """See what may be found after each call of the log."""
    tried = Tried(calls=len(log.calls))
    seen: dict[bool, set[frozenset[tuple[str, bytes | None]]]] = {False: set(), True: set()}
    for calls in range(len(log.calls) + 1):
        returned = calls == len(log.calls)
        for tree in images(log, calls, thorough=thorough):
            image = frozenset(tree.items())
            if image in seen[returned]:
                continue
            seen[returned].add(image)
            tried.images += 1
            if fault := fault_of(scratch / "image", tree, case, returned, system):
                tried.faults.append(f"after {calls} of {len(log.calls)} calls: {fault}")
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


def cut(scratch: Path, case: Save, thorough: bool = False) -> Tried:
    return cut_after_every_call(scratch, case, recorded(scratch, case), thorough=thorough)


CASES = [Save(FIRST), Save(BESIDE), Save(IN_NEW_FOLDERS), Save(FIRST, asynchronous=True)]
RANKS = [Save(FIRST, 2), Save(IN_NEW_FOLDERS, 2), Save(FIRST, 2, asynchronous=True)]


def enter(ledger: Any, case: Save, tried: Tried, *, sample: bool = False) -> None:
    print(*tried.faults, sep="\n")
    note = f"images of the disk, after each of {tried.calls} calls"
    ledger("Power loss", str(case), tried=tried.images, lost=len(tried.faults), note=note, sample=sample)


@pytest.mark.parametrize("case", [*CASES, RANKS[0]], ids=str)
def test_what_a_power_cut_leaves_is_a_whole_checkpoint(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(cut, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, case, tried, sample=True)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", [*CASES, *RANKS], ids=str)
def test_whatever_a_power_cut_leaves_is_a_whole_checkpoint(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(cut, 1, tmp_path, case, True, init=False, timeout_s=LIMIT_S)
    enter(ledger, case, tried)


# -- the images are worth something: they show what is wrong with a save that syncs less ------------------------------


def without_syncs(log: Log, of: set[Node]) -> Log:
    return replace(log, calls=[call for call in log.calls if isinstance(call, list) or call not in of])


def cut_with_less(scratch: Path) -> Iterator[Tried]:
    """Without the syncs of files, without those of folders, and with all of them after everything else."""
    case = Save(FIRST)
    log = recorded(scratch, case)
    syncs = [call for call in log.calls if not isinstance(call, list)]
    late = replace(log, calls=[call for call in log.calls if isinstance(call, list)] + syncs)
    for less in (without_syncs(log, set(log.files)), without_syncs(log, set(log.folders)), late):
        yield cut_after_every_call(scratch, case, less)


def all_with_less(scratch: Path) -> list[Tried]:
    return list(cut_with_less(scratch))


def test_a_save_that_syncs_less_would_be_found_out(tmp_path: Path) -> None:
    (tried,) = run_ranks(all_with_less, 1, tmp_path, init=False, timeout_s=LIMIT_S)
    assert all(less.faults for less in tried)


def test_a_save_without_fsync_promises_nothing_and_is_found_out(tmp_path: Path) -> None:
    (tried,) = run_ranks(cut, 1, tmp_path, Save(FIRST, fsync=False), init=False, timeout_s=LIMIT_S)
    assert tried.faults
