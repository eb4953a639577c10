"""A save that ends in its midst: what is found, loaded and saved over is the earlier checkpoint or the new one, whole.

The power is cut after any call, and the disk keeps what was synced and anything of the rest; or a process is killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import remote, s3
from lightning_shard.testing import run_ranks
from tests.checkpoint.faults.calls import met
from tests.checkpoint.faults.cuts import cut_after_every_call, recorded
from tests.checkpoint.faults.disk import Log, Node, Recorder, images, put
from tests.checkpoint.faults.kills import Ground, kill_at_every_point
from tests.checkpoint.faults.saves import BESIDE, FIRST, IN_NEW_FOLDERS, Save, Tried
from tests.servers import serve

LIMIT_S = 1200.0


def cut(scratch: Path, case: Save, thorough: bool) -> Tried:
    return cut_after_every_call(scratch, case, recorded(scratch, case), thorough=thorough, every=1 if thorough else 3)


CASES = [Save(FIRST), Save(BESIDE), Save(IN_NEW_FOLDERS), Save(FIRST, asynchronous=True)]
RANKS = [Save(FIRST, world_size=2), Save(IN_NEW_FOLDERS, world_size=2), Save(FIRST, asynchronous=True, world_size=2)]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("case", "thorough"),
    [
        *((case, False) for case in CASES[:2]),
        *(pytest.param(case, True, marks=pytest.mark.long) for case in (*CASES, *RANKS)),
    ],
    ids=str,
)
def test_whatever_a_power_cut_leaves_is_a_whole_checkpoint(
    case: Save, thorough: bool, tmp_path: Path, ledger: Any
) -> None:
    (tried,) = run_ranks(cut, 1, tmp_path, case, thorough, init=False, timeout_s=LIMIT_S)
    note = f"after {'each' if thorough else 'some'} of {tried.calls} calls"
    ledger("Power loss", str(case), tried=tried.points, lost=tried.faults, note=note, sample=not thorough)


# -- the images are worth something: their rules, and what they show of a save that syncs less ------------------------


def replace_a(folder: Path, *, sync_file: bool, sync_folder: bool) -> set[bytes | None]:
    """What may be found at ``a``, which held ``old``, after it was replaced by a file of ``new``."""
    (folder / "a").write_bytes(b"old")
    recorder = Recorder(folder, folder.with_suffix(".calls"))
    with met(folder, recorder):
        file = os.open(folder / "a.tmp", os.O_WRONLY | os.O_CREAT)
        os.write(file, b"new")
        if sync_file:
            os.fsync(file)
        os.close(file)
        os.replace(folder / "a.tmp", folder / "a")
        if sync_folder:
            opened = os.open(folder, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)
    log = recorder.log()
    return {tree.get("a") for tree in images(log, len(log.calls), thorough=True)}


def test_the_rules_by_which_images_are_made(tmp_path: Path) -> None:
    found = {}
    for sync_file in (False, True):
        for sync_folder in (False, True):
            folder = tmp_path / f"{sync_file}-{sync_folder}"
            folder.mkdir()
            found[sync_file, sync_folder] = replace_a(folder, sync_file=sync_file, sync_folder=sync_folder)
    assert found[True, True] == {b"new"}
    assert found[True, False] == {b"old", b"new"}
    assert found[False, True] == {b"", b"\0\0\0", b"new"}
    assert found[False, False] == {b"old", b"", b"\0\0\0", b"new"}


def without_syncs(log: Log, of: Collection[Node]) -> Log:
    return replace(log, calls=[call for call in log.calls if isinstance(call, list) or call not in of])


def with_late_syncs(log: Log) -> Log:
    syncs = [call for call in log.calls if not isinstance(call, list)]
    return replace(log, calls=[call for call in log.calls if isinstance(call, list)] + syncs)


def cut_with_less(scratch: Path) -> list[Tried]:
    """Without the syncs of files, without those of folders, and with all of them after everything else."""
    case = Save(FIRST)
    log = recorded(scratch, case)
    less = without_syncs(log, log.files), without_syncs(log, log.folders), with_late_syncs(log)
    return [cut_after_every_call(scratch, case, one, until_fault=True) for one in less]


def cut_without_fsync(scratch: Path) -> list[Tried]:
    case = Save(FIRST, fsync=False)
    return [cut_after_every_call(scratch, case, recorded(scratch, case), until_fault=True)]


@pytest.mark.long  # the rules above hold of what a save that syncs less does, too
@pytest.mark.parametrize("weaker", [cut_with_less, cut_without_fsync])
def test_a_save_that_syncs_less_would_be_found_out(weaker: Callable[[Path], list[Tried]], tmp_path: Path) -> None:
    """What ``fsync=False`` doesn't promise, too."""
    (tried,) = run_ranks(weaker, 1, tmp_path, init=False, timeout_s=LIMIT_S)
    assert all(one.faults for one in tried)


def test_a_power_cut_in_a_removal_leaves_the_whole_checkpoint_or_none(tmp_path: Path) -> None:
    folder, image = tmp_path / "disk", tmp_path / "image"
    checkpoint.save({"t": torch.ones(1)}, folder / "a")
    recorder = Recorder(folder, tmp_path / "calls")
    with met(folder, recorder):
        checkpoint.remove(folder / "a")
    log = recorder.log()
    found = set()
    for calls in range(len(log.calls) + 1):
        for tree in images(log, calls, thorough=True):
            put(tree, image)
            found.add(checkpoint.verify(image / "a").ok if checkpoint.exists(image / "a") else None)
            shutil.rmtree(image)
    assert found == {True, None}


# -- kills ------------------------------------------------------------------------------------------------------------

SMALL_PART_BYTES = 2**16
DISK, S3 = "local disk", "S3"
ONE_PROCESS = [Save(name, asynchronous) for name in (BESIDE, FIRST) for asynchronous in (False, True)]
RANKS_KILLED = [
    Save(name, asynchronous, 2, victim, everyone)
    for name in (BESIDE, FIRST)
    for asynchronous in (False, True)
    for victim, everyone in ((0, False), (1, False), (0, True))
]
ALL = [
    *((DISK, case, None) for case in (*ONE_PROCESS, *RANKS_KILLED)),
    *((S3, case, None) for case in (*ONE_PROCESS, *RANKS_KILLED[-3:])),
]
SAMPLES = [(DISK, ONE_PROCESS[2], 8), (DISK, ONE_PROCESS[3], 8), (DISK, RANKS_KILLED[-3], 4), (S3, ONE_PROCESS[3], 3)]
"""So many points of those that the long tests try, from a save's first to its last."""


def kill(scratch: Path, where: str, case: Save, limit: int | None) -> Tried:
    if where == DISK:
        return kill_at_every_point(Ground(scratch), case, limit)
    s3.PART_BYTES = remote.PUT_BYTES = SMALL_PART_BYTES  # in this process, and those that are forked from it
    with serve("s3", scratch / "served") as server:
        return kill_at_every_point(Ground(scratch, server), case, limit)


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("where", "case", "limit"), [*SAMPLES, *(pytest.param(*one, marks=pytest.mark.long) for one in ALL)], ids=str
)
def test_a_kill_at_any_call_leaves_a_whole_checkpoint(
    where: str, case: Save, limit: int | None, tmp_path: Path, ledger: Any
) -> None:
    (tried,) = run_ranks(kill, 1, tmp_path, where, case, limit, init=False, timeout_s=LIMIT_S)
    ledger("Crash", f"{where}: {case}", tried=tried.points, lost=tried.faults, sample=limit is not None)
