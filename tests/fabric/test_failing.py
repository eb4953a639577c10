"""One rank fails in a step of Fabric's, and a program may catch that: ranks that wait for it end too, and say why."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import RankFailure
from lightning_shard.testing import RanksFailed, run_ranks
from tests.fabric.test_fabric import Text, loss_of, made, start

LIMIT_S = 30
LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pipeline_parallel_size": 2, "microbatches": 2}, "dp2": {}}
LAYOUT = pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.long)])


def steps(layout: str, failing: int, folder: Path, *, catches: bool) -> None:
    """A step, and another one in which one rank's loss function raises."""
    fabric = start(2, LAYOUTS[layout])
    model = made(fabric)["model"]
    rows = torch.stack([Text()[row] for row in range(4)])
    step = fabric.strategy.training_step  # type: ignore[attr-defined]

    def fails(model: Any, rows: Tensor) -> Tensor:
        if fabric.global_rank == failing:
            raise ValueError("a bad sample")
        return loss_of(model, rows)

    (folder / f"pid-{fabric.global_rank}").write_text(str(os.getpid()))
    step(loss_of, model, rows)
    try:
        step(fails, model, rows)
    except ValueError:
        if not catches:
            raise
        wait_for_the_end_of(int((folder / f"pid-{1 - failing}").read_text()))
        with pytest.raises(RankFailure, match=f"rank {1 - failing}"):
            step(loss_of, model, rows)


def wait_for_the_end_of(pid: int) -> None:
    stop = time.monotonic() + LIMIT_S
    while time.monotonic() < stop:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("It should have ended by itself.")


def program(layout: str, failing: int, folder: Path, catches: bool) -> None:
    """Ends this process as a program would end, and keeps what it says."""
    rank = int(os.environ["RANK"])
    os.dup2(os.open(folder / f"said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    code = 0
    try:
        steps(layout, failing, folder, catches=catches)
    except BaseException:
        code = 1
        os.write(2, traceback.format_exc().encode())
    (folder / f"code-{rank}").write_text(str(code))
    os._exit(code)


def run(layout: str, failing: int, folder: Path, *, catches: bool) -> tuple[list[str], dict[int, int]]:
    """What each rank has said, and the codes of those that ended by themselves."""
    patience = mock.patch("lightning_shard.testing.processes.FAILURE_GRACE_S", LIMIT_S)
    with patience, pytest.raises(RanksFailed) as failed:
        run_ranks(program, 2, layout, failing, folder, catches, elastic=True)
    assert all("died (exit code" in account for account in failed.value.accounts.values()), failed.value
    codes = {rank: int(path.read_text()) for rank in range(2) if (path := folder / f"code-{rank}").exists()}
    return [(folder / f"said-{rank}").read_text() for rank in range(2)], codes


@LAYOUT
def test_a_caught_failure_of_one_rank_ends_the_others_by_its_name(layout: str, tmp_path: Path) -> None:
    said, codes = run(layout, 0, tmp_path, catches=True)
    assert "because of the first failure, on rank 0: ValueError: a bad sample" in said[1]
    assert codes == {0: 0}, said  # it went on, and the other one was ended


@LAYOUT
def test_a_failure_that_ends_one_rank_is_raised_on_the_others(layout: str, tmp_path: Path) -> None:
    said, codes = run(layout, 1, tmp_path, catches=False)
    assert codes == {0: 1, 1: 1}
    assert "rank 0 lost the others. The first failure was on rank 1: ValueError: a bad sample" in said[0]
