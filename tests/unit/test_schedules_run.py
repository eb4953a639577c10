"""The schedules that a pipeline runs: which are taken, how one is chosen, and an order of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.orders import build
from lightning_shard.pipeline.placement import Placement, StagePlacement
from lightning_shard.pipeline.schedule import read_csv, to_csv
from lightning_shard.plugin.steps import schedules
from lightning_shard.plugin.steps.schedules import candidates, choose
from tests.unit.pipelines import assert_alike

OWN = Path(__file__).parents[1] / "ranks" / "ahead.csv"


class Pipeline:
    """Stands for the groups of a pipeline whose other ranks have read another file."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def gather_over_stages(self, value: Any) -> list[Any]:
        return [value, *(self.others or (value,))]


def placed(*costs: int) -> Placement:
    return Placement(tuple(StagePlacement(range(i, i + 1), 1, 4, cost) for i, cost in enumerate(costs)))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(schedules, "rank_zero_info", told.append)
    return told


def test_auto_takes_the_one_that_keeps_less_of_equally_fast_ones_and_says_so(told: list[str]) -> None:
    chosen = choose(candidates("auto", 4, 8), placed(5, 5, 5, 5), Pipeline())  # type: ignore[arg-type]
    assert chosen == build("1F1B", 4, 8)
    assert len(told) == 1
    assert 'schedule="auto" chose 1F1B' in told[0]
    assert "1F1B: 27.3 % idle, at most 4 microbatches in flight; GPipe: 27.3 % idle, at most 8" in told[0]


def test_a_schedule_that_was_named_is_taken_without_a_word(told: list[str]) -> None:
    assert choose(candidates("GPipe", 2, 4), placed(1, 9), Pipeline()) == build("GPipe", 2, 4)  # type: ignore[arg-type]
    assert not told


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_schedules_that_cant_be_run_yet_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' can't be run in this version.*'1F1B', 'GPipe', \"auto\""):
        candidates(name, 2, None)
    path = tmp_path / "theirs.csv"
    path.write_text(to_csv(build(name, 2)))
    with pytest.raises(ConfigurationError, match="several stages on a rank, which can't be run in this version"):
        candidates(str(path), 2, None)
    path.write_text("0F0,0B0\n1F0,1I0,1W0\n")
    with pytest.raises(ConfigurationError, match=r"backwards in two parts \(I and W\), which can't be run"):
        candidates(str(path), 2, None)


def test_a_file_that_differs_on_another_rank_is_refused() -> None:
    schedule = candidates(str(OWN), 2, None)
    assert choose(schedule, placed(1, 1), Pipeline()) == schedule[0]  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="another file on other ranks"):
        choose(schedule, placed(1, 1), Pipeline("0F0,0B0\n"))  # type: ignore[arg-type]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return root(x).square().mean()


def test_an_order_of_ones_own_trains_as_one_process() -> None:
    parts = list(torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(1)))
    assert_alike(net, loss, parts, 2, schedule=str(OWN))
    assert read_csv(str(OWN)).in_flight(0) == 4
