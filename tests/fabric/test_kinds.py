"""The pipelined step of Fabric's loops with all that a Trainer's takes: networks, precisions, schedules, dropout.

Where one rank fails in it, and a program may catch that, ranks that wait for it end too, and say why.
"""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import RankFailure
from lightning_shard.testing import RanksFailed, run_ranks
from tests.fabric.test_fabric import EXPERTS, GPT, WIDTH, Block, Mixing, Text, loss_of, made, start, train
from tests.fabric.test_pipelined import STAGES


class Tied(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.wte.weight


class Four(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block(mixes=False))


class Dropping(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Dropped(mixes=False))
        self.ln_f = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.3))  # type: ignore[assignment]


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, training=self.training)


KINDS: dict[str, tuple[type[nn.Module], dict[str, Any], str, float]] = {
    "tied embeddings": (Tied, {}, "32-true", 1e-4),
    "bf16-mixed": (GPT, {}, "bf16-mixed", 2e-2),
    "interleaved": (Four, {"schedule": "Interleaved1F1B"}, "32-true", 1e-4),
    "split backwards in a V": (Four, {"schedule": "ZBVZeroBubble", "microbatches": 4}, "32-true", 1e-4),
}


def losses(devices: int, kind: type[nn.Module], settings: Any, precision: str) -> list[float]:
    """Accumulated, clipped and evaluated, as of ``train``."""
    fabric = start(devices, settings, precision=precision)
    return train(fabric, made(fabric, kind), 2, by_strategy=True)


def of_kinds() -> dict[str, list[float]]:
    return {name: losses(2, kind, {**STAGES, **more}, like) for name, (kind, more, like, _) in KINDS.items()}


@pytest.fixture(scope="module")
def on_stages() -> list[dict[str, list[float]]]:
    return run_ranks(of_kinds, 2, elastic=True, timeout_s=150)


@pytest.mark.parametrize("name", KINDS)
def test_trains_as_one_process(name: str, on_stages: list[dict[str, list[float]]]) -> None:
    kind, _, precision, tolerance = KINDS[name]
    expected = losses(1, kind, None, precision)
    for seen in on_stages:
        assert seen[name] == pytest.approx(expected, rel=tolerance)


@pytest.mark.long
def test_experts_are_dealt_to_the_data_ranks_of_each_stage() -> None:
    expected = losses(1, Mixing, None, "32-true")
    for seen in run_ranks(losses, 4, 4, Mixing, {**STAGES, **EXPERTS}, "32-true", elastic=True):
        assert seen == pytest.approx(expected, rel=1e-4)


def dropped(folder: Path, *, resumes: bool) -> list[float]:
    fabric = start(2, STAGES)
    state = made(fabric, Dropping)
    if resumes:
        fabric.seed_everything(4, verbose=False)
        fabric.load(folder, state)
    else:
        train(fabric, state, 2, by_strategy=True)
        fabric.save(folder, state)
    return train(fabric, state, 2, by_strategy=True)


def test_a_resumed_loop_drops_as_the_uninterrupted_one(tmp_path: Path) -> None:
    [expected, _] = run_ranks(dropped, 2, tmp_path / "two", resumes=False, elastic=True)
    for seen in run_ranks(dropped, 2, tmp_path / "two", resumes=True, elastic=True):
        assert seen == pytest.approx(expected, rel=1e-6)


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
