"""A save is killed at every point: the earlier checkpoint or the new one is whole, is found, and can be saved over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.checkpoint.store import remote, s3
from lightning_shard.testing import run_ranks
from tests.checkpoint.faults.kills import Ground, kill_at_every_point
from tests.checkpoint.faults.saves import BESIDE, FIRST, Save, Tried
from tests.servers import serve

LIMIT_S = 1200.0
SMALL_PART_BYTES = 2**16
DISK, S3 = "local disk", "S3"
ONE_PROCESS = [Save(name, asynchronous) for name in (BESIDE, FIRST) for asynchronous in (False, True)]
RANKS = [
    Save(name, asynchronous, 2, victim, everyone)
    for name in (BESIDE, FIRST)
    for asynchronous in (False, True)
    for victim, everyone in ((0, False), (1, False), (0, True))
]
ALL = [
    *((DISK, case, None) for case in (*ONE_PROCESS, *RANKS)),
    *((S3, case, None) for case in (*ONE_PROCESS, *RANKS[-3:])),
]
SAMPLES = [(DISK, ONE_PROCESS[2], 8), (DISK, ONE_PROCESS[3], 8), (DISK, RANKS[-3], 4), (S3, ONE_PROCESS[3], 3)]
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
