"""The pipelined step of Fabric's loops with all that a Trainer's takes: networks, precisions, schedules, dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lightning_shard.testing import run_ranks
from tests.fabric.test_fabric import EXPERTS, GPT, WIDTH, Block, Mixing, made, start, train
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
