"""Several programs at one path: one of them wins, nothing of its checkpoint is lost, readers never see a mixture."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointConflictError, CheckpointNotFoundError, CheckpointReplacedError
from lightning_shard.testing import run_ranks

ALL = 600
RACES = pytest.mark.parametrize("races", [40, pytest.param(ALL, marks=pytest.mark.long)])


def state(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50, 3), value), "b": torch.full((7,), value)}


def value_of(tensors: dict[str, torch.Tensor]) -> float:
    """What one save wrote: all elements are equal, or it is a mixture."""
    values = {value for tensor in tensors.values() for value in tensor.flatten().tolist()}
    assert len(values) == 1, f"a mixture of {values}"
    return values.pop()


def told(ends: Counter[str]) -> str:
    return ", ".join(f"{number} × {end}" for end, number in ends.most_common())


def alone() -> Any:
    """Of a run of several processes: a group of this one alone, as if it were a job of its own."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def with_pauses(verbs: tuple[str, ...], most_s: float) -> None:
    """Let processes get in each other's way: each pauses before what it does in the store."""
    chance = random.Random(dist.get_rank())

    def paused(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(chance.uniform(0, most_s))
            return original(*args, **kwargs)

        return call

    for verb in verbs:
        setattr(LocalStore, verb, paused(getattr(LocalStore, verb)))


def save_at_once(folder: Path, races: int) -> list[str]:
    group, rank, ends = alone(), dist.get_rank(), []
    with_pauses(("write", "publish", "remove", "remove_empty_folders"), 0.004)
    for race in range(races):
        path = folder / str(race % 10)  # some are new, some overwritten
        dist.barrier()
        try:
            checkpoint.save(state(race * 10 + rank), path, group=group, fsync=False)
            ends.append("saved")
        except CheckpointConflictError as error:
            ends.append(str(error))
        dist.barrier()
        if rank == 0:
            assert checkpoint.verify(path).ok, race
            stored = checkpoint.read(path)
            assert value_of(stored.full()) // 10 == race
            there = {str(file.relative_to(path)) for file in path.rglob("*.*")}
            named = {stored.manifest.table.path, *(file.path for file in stored.manifest.files)}
            assert there == {"manifest.json", *named}, "something was left"
        dist.barrier()
    return ends


@RACES
def test_of_several_saves_to_one_path_one_wins_and_is_whole(
    tmp_path: Path, races: int, ledger: Callable[..., None]
) -> None:
    ends = run_ranks(save_at_once, 3, tmp_path, races, timeout_s=60 + races)
    lost = [end for of_one in ends for end in of_one if end != "saved"]
    assert lost, "they never met"
    assert all("another save was committed to this path while this one was running: attempt" in end for end in lost)
    for race in range(races):
        assert "saved" in [of_one[race] for of_one in ends]
    ledger(
        "Races", "three programs save to one path at once", tried=races, note=f"{len(lost)} refused", sample=races < ALL
    )


def save_and_remove(folder: Path, races: int) -> list[bool]:
    group, rank, kept = alone(), dist.get_rank(), []
    with_pauses(("write", "publish", "remove", "remove_empty_folders", "names", "stamp"), 0.003)
    for race in range(races):
        path = folder / str(race % 5)
        dist.barrier()
        if rank == 0:
            checkpoint.save(state(race), path, group=group, fsync=False)
        else:
            checkpoint.remove(path)
        dist.barrier()
        if rank == 0:
            kept.append(checkpoint.exists(path))
            if kept[-1]:
                assert checkpoint.verify(path).ok, race
                assert value_of(checkpoint.read(path).full()) == race
        dist.barrier()
    return kept


@RACES
def test_a_save_beside_a_removal_is_whole_or_removed(tmp_path: Path, races: int, ledger: Callable[..., None]) -> None:
    kept = Counter(run_ranks(save_and_remove, 2, tmp_path, races, timeout_s=60 + races)[0])
    assert kept[True], "every save was removed"
    ledger("Races", "a save beside a removal", tried=races, note=f"{kept[True]} kept", sample=races < ALL)


EXPECTED = {"loaded", "gathered", "read", "told that it was replaced", "replaced twice while one was read"}


def save_read_and_gather(folder: Path, races: int) -> Counter[str]:
    group, rank, seen = alone(), dist.get_rank(), Counter[str]()
    path = folder / "c"
    if rank == 0:
        checkpoint.save(state(0), path, group=group)
    dist.barrier()
    done = folder / "done"
    if rank == 0:
        chance, race = random.Random(0), 0
        while race < races or len(list(folder.glob("whole-*"))) < dist.get_world_size() - 1:
            checkpoint.save(state(race), path, group=group, fsync=False)
            time.sleep(chance.uniform(0, 0.02))  # or a slow reader never meets one that stays
            race += 1
        done.touch()
        return seen
    with_pauses(("reading", "mapped"), 0.004)
    out = folder / f"{rank}.safetensors"
    while not done.exists():
        into = state(-1)
        try:
            checkpoint.load(path, into, group=group)
            value_of(into)
            seen["loaded"] += 1
            checkpoint.gather(path, out, group=group)
            value_of(checkpoint.read(out).full())
            seen["gathered"] += 1
        except CheckpointReplacedError:
            seen["replaced twice while one was read"] += 1
        try:
            value_of(checkpoint.read(path).full())
            seen["read"] += 1
        except CheckpointReplacedError as error:
            seen["told that it was replaced" if "was replaced by attempt" in str(error) else str(error)] += 1
        if seen["gathered"] and seen["read"]:
            (folder / f"whole-{rank}").touch()
    return seen


@RACES
def test_a_reader_beside_a_writer_sees_one_checkpoint_or_is_told(
    tmp_path: Path, races: int, ledger: Callable[..., None]
) -> None:
    _, *seen = run_ranks(save_read_and_gather, 3, tmp_path, 5 * races, timeout_s=60 + races)
    total = sum(seen, Counter[str]())
    assert set(total) <= EXPECTED
    assert total["told that it was replaced"] + total["replaced twice while one was read"], "they never met"
    about = {"note": told(total), "sample": races < ALL}
    ledger("Races", "readers beside a program that overwrites", tried=total.total(), **about)


def load_and_remove(folder: Path, races: int) -> Counter[str]:
    group, rank, seen = alone(), dist.get_rank(), Counter[str]()
    with_pauses(("reading", "mapped", "remove"), 0.004)
    path = folder / "c"
    for race in range(races):
        if rank == 0:
            checkpoint.save(state(race), path, group=group, fsync=False)
        dist.barrier()
        if rank == 0:
            checkpoint.remove(path)
        else:
            into = state(-1)
            try:
                checkpoint.load(path, into, group=group)
                assert value_of(into) == race
                seen["loaded"] += 1
            except CheckpointNotFoundError:
                seen["told that there is none"] += 1
        dist.barrier()
    assert rank or not path.exists()
    return seen


@RACES
def test_a_load_beside_a_removal_is_whole_or_an_error(tmp_path: Path, races: int, ledger: Callable[..., None]) -> None:
    seen = run_ranks(load_and_remove, 2, tmp_path, races, timeout_s=60 + races)[1]
    assert sum(seen.values()) == races
    ledger("Races", "a load beside a removal", tried=races, note=told(seen), sample=races < ALL)


def finish_late(folder: Path, existing: bool) -> str:
    """Rank 0 is stopped in the midst of its save; its successor saves to the same path, then rank 0 wakes up."""
    group, rank = alone(), dist.get_rank()
    path = folder / "c"
    if rank == 0 and existing:
        checkpoint.save(state(1), path, group=group)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        publish = LocalStore.publish

        def stopped(self: LocalStore, name: str, *args: Any, **kwargs: Any) -> None:
            if self.root == str(path) and name == "manifest.json":
                (folder / "stopped").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            publish(self, name, *args, **kwargs)

        LocalStore.publish = stopped  # type: ignore[method-assign]
        try:
            checkpoint.save(state(2), path, group=group)
        except CheckpointConflictError as error:
            return str(error)
        return "saved"
    while not (folder / "stopped").exists():
        time.sleep(0.01)
    try:
        checkpoint.save(state(3), path, group=group)
    finally:
        os.kill(pids[0], signal.SIGCONT)
    return checkpoint.read(path).manifest.attempt


@pytest.mark.parametrize("existing", [False, True])
def test_a_stalled_save_that_finishes_late_loses(tmp_path: Path, existing: bool, ledger: Callable[..., None]) -> None:
    late, attempt = run_ranks(finish_late, 2, tmp_path, existing)
    assert f"attempt {attempt} of 1 ranks (lightning_shard" in late
    assert checkpoint.verify(tmp_path / "c").ok
    assert value_of(checkpoint.read(tmp_path / "c").full()) == 3
    assert len(list((tmp_path / "c").rglob("*.*"))) == 3
    ledger("Races", "a stalled job finishes its save after its successor has saved", tried=1)
