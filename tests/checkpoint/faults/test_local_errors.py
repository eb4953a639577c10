"""What a disk answers when it can't: an error of ours, on any rank and in a thread; the earlier checkpoint stays."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import run_ranks
from tests.checkpoint.faults.calls import Counting, FailAt, Moment, met
from tests.checkpoint.faults.saves import FIRST, REFUSALS, Place, save, step_at

# What each call may answer. A call that makes, fills, syncs, links or replaces a file.
ERRORS = {
    "open": [errno.EMFILE, errno.EACCES, errno.EROFS, errno.ENOSPC],
    "pwrite": [errno.ENOSPC, errno.EDQUOT, errno.EIO],
    "fsync": [errno.EIO, errno.EDQUOT],
    "link": [errno.ENOSPC, errno.EIO, errno.EACCES],
    "replace": [errno.ENOSPC, errno.EIO, errno.EACCES],
}
STATE = {"a": torch.arange(3000.0), "b": torch.ones(7)}


def failing(verb: str, number: int, below: Path, skip: int) -> Any:
    """Have the ``skip``-th of a call's uses below a folder fail, and all after it; the others are served."""
    original = getattr(os, verb)
    left = [skip]

    def call(*args: Any, **kwargs: Any) -> Any:
        if verb == "open":
            target = os.fspath(args[0]) if args[1] & (os.O_WRONLY | os.O_DIRECTORY) else ""
        else:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[-1])
        if str(target).startswith(str(below)):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return original(*args, **kwargs)

    return mock.patch.object(os, verb, call)


def in_the_foreground(state: dict[str, torch.Tensor], path: Path) -> None:
    checkpoint.save(state, path, optimizer=state)


def in_a_thread(state: dict[str, torch.Tensor], path: Path) -> None:
    with checkpoint.AsyncSaver() as saver:
        saver.save(state, path, optimizer=state)


@pytest.mark.parametrize("save", [in_the_foreground, in_a_thread])
@pytest.mark.parametrize("verb", ERRORS)
def test_an_error_of_the_disk_at_any_moment_is_ours_and_the_earlier_checkpoint_stays(
    tmp_path: Path, verb: str, save: Callable[..., None], ledger: Callable[..., None]
) -> None:
    tried = lost = 0
    new = {name: tensor + 1 for name, tensor in STATE.items()}
    for number in ERRORS[verb][: 1 if save is in_a_thread else None]:
        for skip in range(20):
            path = tmp_path / f"{number}-{skip}"
            if verb != "link":  # which is for a new manifest
                in_the_foreground(STATE, path)
            unsupported = verb in ("open", "link") and number in (errno.EACCES, errno.EPERM)
            failed = False
            with failing(verb, number, path, skip):
                try:
                    save(new, path)
                except CheckpointError as error:
                    failed = os.strerror(number) in str(error)
                    lost += not failed
            if not failed:
                # a folder that can't be opened isn't synced; else there were fewer calls
                assert skip or unsupported, "nothing failed"
                if not unsupported:
                    break
            tried += failed
            if verb == "link" and not checkpoint.exists(path):
                continue
            assert checkpoint.verify(path).ok
            found = checkpoint.read(path)["a"].full()
            assert torch.equal(found, STATE["a"]) or torch.equal(found, new["a"])
            # a folder that can't be synced after the commit is an error, too
            lost += failed and verb in ("pwrite", "replace") and not torch.equal(found, STATE["a"])
            if unsupported and not failed:
                break
    ledger("Disk", f"{verb} fails in a save, {save.__name__.replace('_', ' ')}", tried=tried, lost=lost)


@pytest.mark.long
def test_an_error_of_any_one_call_leaves_a_whole_checkpoint(tmp_path: Path, ledger: Callable[..., None]) -> None:
    """The old one or the new one, and the new one where the save has returned."""
    place, counting, lost = Place(str(tmp_path), FIRST, tmp_path), Counting(), []
    save(place, 1)
    with met(tmp_path, counting):
        save(place, 2)
    for index, name in enumerate(counting.names):
        save(place, 1)
        allowed = {1, 2}
        try:
            with met(tmp_path, FailAt(Moment(index))):
                save(place, 2)
            allowed = {2}
        except (CheckpointError, OSError):
            pass
        try:
            if (found := step_at(place.path)) not in allowed:
                lost.append(f"{name}, call {index}: there is step {found}, and not one of {allowed}")
        except REFUSALS as error:
            lost.append(f"{name}, call {index}: {error}")
    what = "local disk: an input/output error of any one call, save over one, one process"
    ledger("Stores that fail", what, tried=len(counting.names), lost=lost)


def save_with_a_fault(folder: Path, victim: int, number: int) -> str:
    path = folder / "c"
    state = {f"{rank}": torch.full((60_000,), 1.0) for rank in range(2)}  # each rank writes one
    checkpoint.save(state, path)
    verb, below = "open" if number == errno.EMFILE else "pwrite", path if dist.get_rank() == victim else folder / "none"
    with failing(verb, number, below, 0):
        try:
            checkpoint.save({name: tensor + 1 for name, tensor in state.items()}, path)
        except CheckpointError as error:
            return str(error)
    return "nothing"


def fail_on_each_rank(folder: Path) -> list[tuple[int, int, str]]:
    ends = []
    for victim in range(2):
        for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE):
            place = folder / f"{victim}-{number}"
            ends.append((victim, number, save_with_a_fault(place, victim, number)))
            dist.barrier()
    return ends


def test_an_error_on_any_rank_is_raised_on_all(tmp_path: Path, ledger: Callable[..., None]) -> None:
    ends = run_ranks(fail_on_each_rank, 2, tmp_path)
    for rank, of_one in enumerate(ends):
        for victim, number, message in of_one:
            assert os.strerror(number) in message
            assert (f"rank {victim}: OSError" in message) == (rank != victim)
            path = tmp_path / f"{victim}-{number}" / "c"
            assert checkpoint.verify(path).ok
            assert checkpoint.read(path)["0"].full().unique().tolist() == [1]
    ledger("Disk", "a write fails on one of two ranks", tried=len(ends[0]))


def test_a_folder_whose_sync_fails_is_an_error(tmp_path: Path) -> None:
    original = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return original(path, flags, *args)

    with mock.patch.object(os, "open", refuse), pytest.raises(CheckpointError, match="Too many open files"):
        checkpoint.save(STATE, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    checkpoint.save(STATE, tmp_path / "c")
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(STATE, blocked / "c")
    assert blocked.read_bytes() == b""
