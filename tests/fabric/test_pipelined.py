"""A loop of Fabric's on pipeline stages: ``strategy.training_step`` and ``evaluation_step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from lightning_shard import checkpoint
from lightning_shard.errors import BatchError, StepError
from lightning_shard.testing import run_ranks
from tests.fabric.test_fabric import TENSOR_PLAN, Text, loss_of, made, resumed, start, whole_run

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, STAGES),
    "pp2 × dp2": (4, STAGES),
    "pp2 × tp2": (4, {**STAGES, "tensor_parallel_size": 2, "tensor_parallel_plan": TENSOR_PLAN}),
    "dp2": (2, {}),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    folder = tmp_path_factory.mktemp("one")
    [seen] = run_ranks(whole_run, 1, 1, {}, folder, elastic=True)
    return seen, folder


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("pp2", "pp2 × dp2") else pytest.mark.long) for name in LAYOUTS]
)
def test_trains_as_one_process_and_is_resumed_on_other_layouts(
    name: str, one_process: tuple[list[float], Path], tmp_path: Path
) -> None:
    world, settings = LAYOUTS[name]
    expected, folder = one_process
    how = {"by_strategy": True, "elastic": True}
    for seen in run_ranks(whole_run, world, world, settings, tmp_path, after=name == "pp2", **how):
        assert seen == pytest.approx(expected, rel=1e-4)
    ours, theirs = (checkpoint.load(each / "four") for each in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5)
    if name == "pp2":
        for seen in run_ranks(resumed, 2, 2, {}, tmp_path / "two", **how):
            assert seen == pytest.approx(expected[6:], rel=1e-4)
        for seen in run_ranks(resumed, 2, 2, STAGES, folder / "two", **how):
            assert seen == pytest.approx(expected[6:], rel=1e-4)


def test_one_file_of_stages_resumes_on_one_process(one_process: tuple[list[float], Path], tmp_path: Path) -> None:
    expected, _ = one_process
    settings = {**STAGES, "save_distributed_checkpoint": False}
    run_ranks(whole_run, 2, 2, settings, tmp_path, by_strategy=True, elastic=True)
    assert (tmp_path / "two").is_file()
    [seen] = run_ranks(resumed, 1, 1, {}, tmp_path / "two", elastic=True)
    assert seen == pytest.approx(expected[6:], rel=1e-4)


def refuses() -> None:
    fabric = start(2, STAGES)
    state = made(fabric)
    model, own_norm = state["model"], clip_grad._get_total_norm
    rows = torch.stack([Text()[row] for row in range(4)])
    step = fabric.strategy.training_step  # type: ignore[attr-defined]
    with pytest.raises(StepError, match="training_step"):
        model(rows[:, :-1])
    with pytest.raises(StepError, match="training_step"):
        fabric.backward(torch.ones((), requires_grad=True))
    with pytest.raises(BatchError, match="microbatches"):
        step(loss_of, model, rows[:3])
    with pytest.raises(BatchError, match="Sentence 1"):
        step(loss_of, model, rows[: 2 + 2 * fabric.global_rank])
    step(loss_of, model, rows)
    with pytest.raises(StepError, match=r"fabric\.clip_gradients"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert nn.utils.clip_grad_norm_([other := nn.Parameter(torch.ones(2))], 1.0) == 0
    assert other.grad is None
    state["optimizer"].step()
    assert clip_grad._get_total_norm is own_norm


def refuses_other_values() -> None:
    fabric = start(2, STAGES)
    model = made(fabric)["model"]
    rows = torch.stack([Text()[row + fabric.global_rank] for row in range(4)])
    with pytest.raises(BatchError, match="batches differ"):
        fabric.strategy.training_step(loss_of, model, rows)  # type: ignore[attr-defined]


def summed(model: Any, rows: Tensor) -> Tensor:
    return loss_of(model, rows) * len(rows)


def reports_sums() -> None:
    fabric = start(2, STAGES)
    model = made(fabric)["model"]
    rows = torch.stack([Text()[row] for row in range(4)])
    if fabric.global_rank == 0:
        with pytest.warns(UserWarning, match="The training loss is a sum over samples"):
            fabric.strategy.training_step(summed, model, rows)  # type: ignore[attr-defined]
    else:
        fabric.strategy.training_step(summed, model, rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("claim", [refuses, refuses_other_values, reports_sums])
def test_what_would_be_wrong_is_said_on_every_rank(claim: Any) -> None:
    run_ranks(claim, 2, elastic=True)
