"""One rank fails in a step of Fabric's, and a program may catch that: ranks that wait for it end too, and say why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import RankFailure
from tests.fabric.test_fabric import Text, loss_of, made, start
from tests.paths import ROOT

LIMIT_S = 100
"""Half of it at most is a start of two processes on a busy machine."""
LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pipeline_parallel_size": 2, "microbatches": 2}, "dp2": {}}
PROGRAM = """
from tests.fabric import test_failing

if __name__ == "__main__":
    test_failing.{program}
"""


def run(folder: Path, program: str) -> tuple[int, str, str]:
    """Run a function of this module as a script on two ranks, which Fabric starts; a hang fails."""
    script = folder / "program.py"
    script.write_text(PROGRAM.format(program=program))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=env, cwd=ROOT)
    return ended.returncode, ended.stdout, ended.stderr


def steps(layout: str, failing: int, *, catches: bool) -> None:
    """A step, and another one in which one rank's loss function raises."""
    fabric = start(2, LAYOUTS[layout])
    model = made(fabric)["model"]
    rows = torch.stack([Text()[row] for row in range(4)])
    step = fabric.strategy.training_step  # type: ignore[attr-defined]

    def fails(model: Any, rows: Tensor) -> Tensor:
        if fabric.global_rank == failing:
            raise ValueError("a bad sample")
        return loss_of(model, rows)

    step(loss_of, model, rows)
    try:
        step(fails, model, rows)
    except ValueError:
        if not catches:
            raise
        print("caught", flush=True)
        time.sleep(15)  # the others end by themselves
        with pytest.raises(RankFailure, match="rank 1"):
            step(loss_of, model, rows)
        print("refused", flush=True)
    except RankFailure as error:
        print(f"rank {fabric.global_rank} got: {error}", flush=True)
        raise


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.long)])
def test_a_caught_failure_of_one_rank_ends_the_others_by_its_name(layout: str, tmp_path: Path) -> None:
    code, out, err = run(tmp_path, f"steps({layout!r}, 0, catches=True)")
    assert "because of the first failure, on rank 0: ValueError: a bad sample" in err
    assert out.split() == ["caught", "refused"]
    assert code == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_that_ends_one_rank_is_raised_on_the_others(layout: str, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, f"steps({layout!r}, 1, catches=False)")
    assert code == 1
    assert "rank 0 got: rank 0 lost the others. The first failure was on rank 1: ValueError: a bad sample" in out
