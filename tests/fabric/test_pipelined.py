"""A loop of Fabric's on pipeline stages: ``strategy.training_step`` and ``evaluation_step``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.data import DataLoader

from lightning_shard import checkpoint
from lightning_shard.errors import BatchError, StepError
from lightning_shard.testing import run_ranks
from tests.fabric.test_fabric import (
    ACCUMULATED,
    GLOBAL_BATCH,
    GPT,
    TENSOR_PLAN,
    Text,
    data_ranks,
    loss_of,
    start,
)

STAGES = {"pipeline_parallel_size": 2, "microbatches": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, STAGES),
    "pp2 × dp2": (4, STAGES),
    "pp2 × tp2": (4, {**STAGES, "tensor_parallel_size": 2, "tensor_parallel_plan": TENSOR_PLAN}),
    "dp2": (2, {}),
}


def part_of_loss(model: Any, rows: Tensor) -> Tensor:
    return loss_of(model, rows) / ACCUMULATED


def made(fabric: Any, *, after: bool = False) -> dict[str, Any]:
    fabric.seed_everything(3, verbose=False)
    model: Any = GPT()
    if after:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return {"model": model, "optimizer": optimizer, "step": 0}


def train(fabric: Any, state: dict[str, Any], steps: int) -> list[float]:
    """Losses, norms and evaluated losses, with accumulation and clipping."""
    model, optimizer, several = state["model"], state["optimizer"], fabric.world_size > 1
    loader = DataLoader(Text(), batch_size=GLOBAL_BATCH // ACCUMULATED // data_ranks(fabric))
    batches, seen = list(fabric.setup_dataloaders(loader)), []
    for step in range(state["step"], state["step"] + steps):
        total = torch.zeros(())
        for part in range(ACCUMULATED):
            batch = batches[step * ACCUMULATED + part]
            with fabric.no_backward_sync(model, enabled=several and part < ACCUMULATED - 1):
                if several:
                    total += fabric.strategy.training_step(part_of_loss, model, batch)
                else:
                    loss = part_of_loss(model, batch)
                    fabric.backward(loss)
                    total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            last = batches[-1]
            loss = fabric.strategy.evaluation_step(loss_of, model, last) if several else loss_of(model, last)
        seen += [float(fabric.all_reduce(each)) for each in (total, loss)] + [float(norm)]
    state["step"] += steps
    return seen


def whole_run(devices: int, settings: Any, folder: Path | None, *, after: bool = False) -> list[float]:
    fabric = start(devices, settings)
    state = made(fabric, after=after)
    seen = train(fabric, state, 2)
    if folder is not None:
        fabric.save(folder / "two", state)
    seen += train(fabric, state, 2)
    if folder is not None:
        fabric.save(folder / "four", state)
    return seen


def resumed(devices: int, settings: Any, path: Path) -> list[float]:
    fabric = start(devices, settings)
    state = made(fabric)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.mul_(0.5)
    assert fabric.load(path, state) == {}
    assert state["step"] == 2
    return train(fabric, state, 2)


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
    for seen in run_ranks(whole_run, world, world, settings, tmp_path, after=name == "pp2", elastic=True):
        assert seen == pytest.approx(expected, rel=1e-4)
    ours, theirs = (checkpoint.load(each / "four") for each in (tmp_path, folder))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-5)
    if name == "pp2":
        for seen in run_ranks(resumed, 2, 2, {}, tmp_path / "two", elastic=True):
            assert seen == pytest.approx(expected[6:], rel=1e-4)
        for seen in run_ranks(resumed, 2, 2, STAGES, folder / "two", elastic=True):
            assert seen == pytest.approx(expected[6:], rel=1e-4)


def test_one_file_of_stages_resumes_on_one_process(one_process: tuple[list[float], Path], tmp_path: Path) -> None:
    expected, _ = one_process
    run_ranks(whole_run, 2, 2, {**STAGES, "save_distributed_checkpoint": False}, tmp_path, elastic=True)
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
