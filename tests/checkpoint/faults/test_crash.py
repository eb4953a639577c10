"""A save is killed at every point: the earlier checkpoint or the new one is whole, is found, and can be saved over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.checkpoint.store import remote, s3
from lightning_shard.testing import run_ranks
from tests.checkpoint.faults.kills import Ground, Save, Tried, kill_at_every_point
from tests.checkpoint.faults.saves import OURS
from tests.servers import serve

LIMIT_S = 1200.0
SAMPLE = 8
"""Points of those that the long tests try, from a save's first to its last."""
SMALL_PART_BYTES = 2**16

# -- on the local disk ------------------------------------------------------------------------------------------------


def kill_on_disk(scratch: Path, case: Save, limit: int | None = None) -> Tried:
    return kill_at_every_point(Ground(scratch), case, limit)


ONE_PROCESS = [Save(overwrite, asynchronous) for overwrite in (False, True) for asynchronous in (False, True)]
RANKS = [
    Save(overwrite, asynchronous, 2, victim, everyone)
    for overwrite in (False, True)
    for asynchronous in (False, True)
    for victim, everyone in ((0, False), (1, False), (0, True))
]


def enter(ledger: Any, where: str, case: Save, tried: Tried, *, sample: bool = False) -> None:
    """A row, after the faults have been printed."""
    print(*tried.faults, sep="\n")
    ledger("Crash", f"{where}: {case}", tried=tried.points, lost=len(tried.faults), sample=sample)


@pytest.mark.parametrize("case", ONE_PROCESS[2:], ids=str)
def test_a_kill_now_and_then(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_disk, 1, tmp_path, case, SAMPLE, init=False, timeout_s=LIMIT_S)
    enter(ledger, "local disk", case, tried, sample=True)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", ONE_PROCESS, ids=str)
def test_a_kill_at_any_call_leaves_a_whole_checkpoint(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_disk, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, "local disk", case, tried)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", RANKS, ids=str)
def test_a_kill_of_a_rank_at_any_call_leaves_a_whole_checkpoint(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_disk, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, "local disk", case, tried)


@pytest.mark.parametrize("case", [RANKS[-3]], ids=str)
def test_a_kill_of_a_rank_now_and_then(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_disk, 1, tmp_path, case, 4, init=False, timeout_s=LIMIT_S)
    enter(ledger, "local disk", case, tried, sample=True)


# -- on S3 ------------------------------------------------------------------------------------------------------------


def kill_on_s3(scratch: Path, case: Save, limit: int | None = None) -> Tried:
    s3.PART_BYTES = remote.PUT_BYTES = SMALL_PART_BYTES  # in this process, and those that are forked from it
    with serve("s3", scratch / "served") as server:
        return kill_at_every_point(Ground(scratch, OURS, server), case, limit)


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("case", [*ONE_PROCESS, *RANKS[-3:]], ids=str)
def test_a_kill_at_any_request_leaves_a_whole_checkpoint(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_s3, 1, tmp_path, case, init=False, timeout_s=LIMIT_S)
    enter(ledger, "S3", case, tried)


@pytest.mark.parametrize("case", [Save(overwrite=True, asynchronous=True)], ids=str)
def test_a_kill_at_a_request_now_and_then(case: Save, tmp_path: Path, ledger: Any) -> None:
    (tried,) = run_ranks(kill_on_s3, 1, tmp_path, case, 3, init=False, timeout_s=LIMIT_S)
    enter(ledger, "S3", case, tried, sample=True)
