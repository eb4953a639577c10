"""The schedules that a pipeline runs: which are taken, how one is chosen, and an order of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.steps import schedule_choice
from lightning_shard.plugin.steps.schedule_choice import agree, candidates, effective_schedule
from tests.paths import SCHEDULE_AHEAD
from tests.training.pipelines import assert_alike, on_stages


class Pipeline:
    """Stands for the groups of a pipeline whose other ranks have read another file."""

    def __init__(self, *others: str) -> None:
        self.others = others

    def gather_over_stages(self, value: Any) -> list[Any]:
        return [value, *(self.others or (value,))]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(schedule_choice, "rank_zero_info", told.append)
    return told


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_backwards_are_whole_where_settings_leave_nothing_for_a_second_part(name: str, told: list[str]) -> None:
    [schedule] = candidates(name, 2, None)
    assert effective_schedule(schedule, {"activation_checkpointing": 2, "reshard_after_forward": False}) is schedule
    assert not told
    for settings in ({"activation_checkpointing": True}, {"compile_blocks": "eager", "reshard_after_forward": True}):
        whole = effective_schedule(schedule, settings)
        whole.check()
        assert not whole.splits_backwards
        assert whole.rank_of == schedule.rank_of
        assert f"schedule={name!r} runs whole backwards" in told[-1]
        assert " and ".join(settings) in told[-1]
    assert len(told) == 2


def test_a_file_that_differs_on_another_rank_is_refused() -> None:
    schedule = candidates(str(SCHEDULE_AHEAD), 2, None)
    assert agree(schedule, None, Pipeline()) == schedule[0]  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a file that differs between ranks"):
        agree(schedule, None, Pipeline("0F0,0B0\n"))  # type: ignore[arg-type]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return root(x).square().mean()


def parts() -> list[Tensor]:
    return list(torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(1)))


def test_an_order_trains_as_one_process(tmp_path: Path) -> None:
    path = tmp_path / "backwards in two parts and whole ones.csv"
    path.write_text("0F0,0F1,0I0,0F2,0F3,0I1,0W1,0B2,0W0,0I3,0W3\n1F0,1I0,1F1,1F2,1B1,1W0,1I2,1F3,1I3,1W3,1W2\n")
    for schedule in ("Eager1F1B", str(SCHEDULE_AHEAD), str(path)):
        assert_alike(net, loss, parts(), 2, schedule=schedule)


class Positions(nn.Module):
    """Its gradient is what the stage before gets: autograd gives both the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(2, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.position.view(1, 2, 4)).tanh()
        return out


@pytest.mark.parametrize("schedule", ["GPipe", "InterleavedZeroBubble"])
def test_gradients_on_their_way_stay_what_they_were_sent_as(schedule: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Positions() for _ in range(4)))

    assert_alike(net, loss, [part[None] for part in parts()], 2, schedule=schedule)


@pytest.mark.parametrize("raises_in", ["I", "W"])
def test_an_error_in_either_part_ends_the_step_on_all_stages(raises_in: str) -> None:
    runs: list[int] = []

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            runs.append(1)
            if len(runs) > 1:  # the first microbatch's backward is a whole one
                raise RuntimeError("out of memory")
            return gradients[0]

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if raises_in == "I":
                return super().forward(Failing.apply(x))
            return nn.functional.linear(x, Failing.apply(self.weight), self.bias)

    options: dict[str, Any] = {"schedule": "InterleavedZeroBubble", "stages_per_rank": 1}
    with pytest.raises(RuntimeError, match="out of memory"):
        on_stages(lambda: nn.Sequential(nn.Linear(4, 4), Fails(4, 4)), loss, parts(), 2, **options)
    assert len(runs) == 2
