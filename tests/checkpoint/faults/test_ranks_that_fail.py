"""One rank fails while all save or load: the others stop with an error of ours that names it, and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint import ranks
from lightning_shard.checkpoint.saving import save as saving
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError, RankFailure
from lightning_shard.testing import RanksFailed, run_ranks

TIMEOUT_S = 4
VICTIM = 1
FAULTS = ["raises", "is stopped", "hangs"]
FAULTY = {"save": (LocalStore, "write"), "load": (LocalStore, "reading"), "merge": (saving, "joined")}
"""By operation, what fails: a rank that touches its files, or a leader that joins what the ranks of its group wrote."""


def sharded(value: float) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((6, 3), value), mesh, [Shard(0)], src_data_rank=None)}


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def fail(fault: str, folder: Path) -> None:
    if fault == "raises":
        raise ValueError("a fault of rank 1's own")
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        wait_for(folder / "go on")


def attempt(operation: str, fault: str, folder: Path, group: Any) -> tuple[str, str, float]:
    """Save or load, in which the victim fails: the error, and how long that took."""
    owner, verb = FAULTY[operation]
    original = getattr(owner, verb)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, verb, original)
        fail(fault, folder)
        return original(*args, **kwargs)

    state = sharded(2)
    if dist.get_rank() == VICTIM:
        setattr(owner, verb, faulty)
    began = time.monotonic()
    try:
        if operation == "load":
            checkpoint.load(folder / "c", state, group=group)
        else:
            checkpoint.save(state, folder / "c", group=group)
    except BaseException as error:
        ours = isinstance(error, RankFailure) and isinstance(error, CheckpointError)
        return ("ours" if ours else type(error).__name__), str(error), time.monotonic() - began
    finally:
        setattr(owner, verb, original)
    return "nothing", "", 0.0


def lead(operation: str) -> None:
    """So that the victim is a leader of a group, where these are to fail."""
    if operation == "merge":
        ranks.GROUP_RANKS = 1


def fail_in_turn(operation: str, root: Path) -> list[tuple[str, str, float]]:
    lead(operation)
    rank, ends = dist.get_rank(), []
    groups = [dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) for _ in FAULTS]
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    for fault, group in zip(FAULTS, groups):
        folder = root / fault
        checkpoint.save(sharded(1), folder / "c")
        dist.barrier()
        ends.append(attempt(operation, fault, folder, group))
        (folder / f"{rank}").touch()
        if rank == 0:  # the victim goes on once the others have given up
            wait_for(folder / "2")
            (folder / "go on").touch()
            while not (folder / f"{VICTIM}").exists():  # on a busy machine it may be stopped only now
                os.kill(pids[VICTIM], signal.SIGCONT)
                time.sleep(0.1)
        dist.barrier()
    return ends


@pytest.mark.parametrize("operation", ["save", *(pytest.param(o, marks=pytest.mark.long) for o in ("load", "merge"))])
def test_a_rank_that_raises_is_stopped_or_hangs_is_named_and_nothing_is_lost(
    tmp_path: Path, operation: str, ledger: Callable[..., None]
) -> None:
    ends = run_ranks(fail_in_turn, 3, operation, tmp_path, timeout_s=90)
    for number, fault in enumerate(FAULTS):
        for rank in (0, 2):
            kind, message, seconds = ends[rank][number]
            assert kind == "ours", (fault, kind, message)
            assert (
                "rank 1: ValueError: a fault" if fault == "raises" else "rank 1 didn't join the collective"
            ) in message, fault
            assert seconds < 10 * TIMEOUT_S
        assert ends[VICTIM][number][0] == ("ValueError" if fault == "raises" else "ours")
        assert checkpoint.verify(tmp_path / fault / "c").ok
        assert checkpoint.read(tmp_path / fault / "c")["w"][5].tolist() == [1, 1, 1]
    ledger("Ranks that fail", f"one of three ranks raises, is stopped or hangs in a {operation}", tried=len(FAULTS))


def lose_one(operation: str, root: Path) -> None:
    lead(operation)
    group = dist.new_group(timeout=timedelta(seconds=10 * TIMEOUT_S))
    checkpoint.save(sharded(1), root / "c")
    dist.barrier()
    end = attempt(operation, "dies", root, group)
    (root / f"{dist.get_rank()}.end").write_text("\n".join(map(str, end)))
    wait_for(root / f"{2 - dist.get_rank()}.end")


@pytest.mark.parametrize("operation", FAULTY)
def test_a_rank_that_dies_is_named_by_the_others_at_once(
    tmp_path: Path, operation: str, ledger: Callable[..., None]
) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 3 failed first"):
        run_ranks(lose_one, 3, operation, tmp_path)
    kind, _, message = (tmp_path / "0.end").read_text().partition("\n")
    assert kind == "ours", message
    assert "rank 1 didn't join the collective: it has ended" in message
    assert checkpoint.verify(tmp_path / "c").ok
    assert checkpoint.read(tmp_path / "c")["w"][5].tolist() == [1, 1, 1]
    ledger("Ranks that fail", f"one of three ranks is killed in a {operation}", tried=1)
