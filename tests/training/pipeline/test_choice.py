"""``schedule="auto"``: what it is worth to be faster, and what may not be credited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.dryrun.planning import plan
from lightning_shard.layout import Layout
from lightning_shard.pipeline.cost import measure, watch
from lightning_shard.pipeline.placement import Placement, StagePlacement
from lightning_shard.pipeline.schedules.choice import Choice, best
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly import placing
from lightning_shard.plugin.assembly.placing import blocks_of
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.schedule_choice import (
    agree,
    candidates,
    choose,
    evaluation_schedules,
    fitting_schedules,
)
from tests.training.parallel.small import Descends

CPU = torch.device("cpu")
TWO_PARTS = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def stages(schedule: Schedule, costs: Sequence[int], later: float = 1.0, again: float = 0.0) -> list[StagePlacement]:
    """Of one stage on each rank; several stages on one share its cost."""
    each = schedule.stages // len(costs)
    own = [cost / each for cost in costs for _ in range(each)]
    return [
        StagePlacement(range(i, i + 1), 1, round(100 * cost), cost, later=later * cost, again=again * cost)
        for i, cost in enumerate(own)
    ]


def chosen(costs: Sequence[int], microbatches: int, later: float = 1.0, **options: Any) -> Choice:
    among = candidates("auto", len(costs), microbatches)
    return best([(schedule, stages(schedule, costs, later)) for schedule in among], **options)


def test_all_schedules_are_compared_and_the_choice_says_of_each_how_long_and_how_much() -> None:
    said = str(chosen((5, 5, 5, 5), 8))
    for compared in (
        'schedule="auto" chose InterleavedZeroBubble',
        "1F1B 1.00, 27 % idle, keeps 1.00",
        "Eager1F1B 1.00, 27 % idle, keeps 1.75 (over 1.5)",
        "GPipe 1.00",
        "Interleaved1F1B (2 stages on each rank) 0.86, 16 % idle, keeps 1.38",
        "InterleavedZeroBubble 0.82",
        "InterleavedZeroBubble (2 stages on each rank) 0.77",
        "ZBVZeroBubble (2 stages on each rank) 0.77",
        "DualPipeV (2 stages on each rank) 0.77",
    ):
        assert compared in said
    assert "\n" not in said


def test_the_simpler_one_wins_where_the_gain_is_small() -> None:
    assert chosen((5, 5, 5, 5), 8).schedule.stages == 8
    assert chosen((5, 5, 5, 5), 16).schedule.stages == 4  # still in two parts
    assert chosen((5, 5, 5, 5), 64).schedule.name == "1F1B"  # which is idle for 4 % of the time
    assert chosen((5, 5), 8).schedule.name == "InterleavedZeroBubble"
    assert chosen((5, 5), 8, has_data_ranks=True).schedule.name == "1F1B"  # nothing is reduced beside a backward


def test_backwards_that_stay_whole_are_credited_with_nothing() -> None:
    none = chosen((5, 5, 5, 5), 8, later=0.0)
    assert none.schedule.name == "Interleaved1F1B"
    assert not {each.timeline.schedule.name for each in none.among} & TWO_PARTS
    for one, half, whole in zip(*(chosen((5, 5, 5, 5), 8, later=later).among for later in (0.01, 0.5, 1.0))):
        if one.timeline.schedule.name in TWO_PARTS:
            assert one.duration_of > half.duration_of > whole.duration_of
        else:
            assert one.duration_of == half.duration_of == whole.duration_of
    assert chosen((5, 5), 8, later=0.5).schedule.name == "1F1B"


@pytest.mark.parametrize("costs", [(5, 5), (3, 2), (5, 5, 5, 5), (8, 5, 5, 5), (1, 1, 1, 9)])
@pytest.mark.parametrize("later", [0.0, 0.5, 1.0])
def test_it_never_keeps_more_than_half_as_much_again_as_1f1b(costs: Sequence[int], later: float) -> None:
    for microbatches in (len(costs), 2 * len(costs) + 1):
        choice = chosen(costs, microbatches, later)
        [own] = [each for each in choice.among if each.timeline.schedule is choice.schedule]
        assert own.kept_of <= 1.5
        assert own.duration_of <= 1.0
        assert own.price <= 1.0


def test_what_fits_follows_from_blocks_microbatches_and_counts() -> None:
    def names(microbatches: int | None, blocks: int, placement: Any = "auto") -> set[tuple[str, int]]:
        fitting = fitting_schedules(candidates("auto", 4, microbatches, placement), blocks, placement)
        return {(schedule.name, schedule.stages) for schedule in fitting}

    one_each = {(name, 4) for name in ("1F1B", "Eager1F1B", "GPipe", "InterleavedZeroBubble")}
    interleaved = {("Interleaved1F1B", 8), ("InterleavedZeroBubble", 8)}
    vs = {("ZBVZeroBubble", 8), ("DualPipeV", 8)}
    assert names(None, 8) == one_each | interleaved | vs
    assert names(None, 7) == one_each
    assert names(7, 8) == one_each | interleaved  # a V needs twice the ranks
    assert names(8, 9, [3, 2, 2, 2]) == one_each
    assert names(8, 9, [2, 1, 1, 1, 1, 1, 1, 1]) == interleaved | vs
    assert names(8, 12, [1] * 12) == {("Interleaved1F1B", 12), ("InterleavedZeroBubble", 12)}


def test_where_nothing_is_trained_the_simplest_is_taken() -> None:
    assert [s.name for s in evaluation_schedules(candidates("auto", 2, 4), "auto")] == ["1F1B"]
    assert [s.name for s in evaluation_schedules(candidates("auto", 2, 4), [1, 1, 1, 1])] == ["Interleaved1F1B"]
    assert [s.name for s in evaluation_schedules(candidates("ZBVZeroBubble", 2, 4), "auto")] == ["ZBVZeroBubble"]


class FirstRankSays:
    """Stands for the groups of a rank that has counted other costs than the first one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def from_first_rank(self, value: int) -> int:
        return self.number


def test_every_rank_takes_what_the_first_one_chose() -> None:
    among = candidates("auto", 4, 8)
    choice = choose(among, lambda s: Placement(tuple(stages(s, (5, 5, 5, 5)))), {}, has_data_ranks=False)
    assert choice.schedule != among[2]
    assert agree(among, choice, FirstRankSays(2)) is among[2]  # type: ignore[arg-type]


# -- which weights' gradients can come later --------------------------------------------------------------------------

WIDTH = 16


class Attention(nn.Module):
    """Four products with weights, of WIDTH² each a row, and two without; of as many rows as features, 4 : 2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        out: Tensor = self.out((q @ k.mT).softmax(-1) @ v)
        return x + out


def later_of(block: nn.Module, *, counted: bool = True, beside: nn.Module | None = None) -> float:
    parts = {"head": (1, beside)} if beside is not None else {}
    watched = {"block": block, **{name: part for name, (_, part) in parts.items()}}
    seen = watch(watched, lambda: block(torch.zeros(2, WIDTH, WIDTH))) if counted else None
    return measure([("block", block)], parts, seen).blocks[0].later


def test_of_a_block_only_products_with_weights_come_later() -> None:
    assert later_of(Attention()) == pytest.approx(4 / 6)
    assert later_of(nn.Linear(WIDTH, WIDTH)) == 1.0
    assert later_of(nn.Conv1d(WIDTH, WIDTH, 1)) == 0.0
    assert later_of(nn.LayerNorm(WIDTH)) == 0.0
    estimated = later_of(Attention(), counted=False)
    assert 0.9 < estimated < 1.0  # of its parameters all but biases and the norm's


# -- plans ------------------------------------------------------------------------------------------------------------


class Module(Descends):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


@pytest.mark.parametrize(("blocks", "settings"), [(8, {}), (6, {"activation_checkpointing": 2})])
def test_a_plan_chooses_as_a_run_does(blocks: int, settings: dict[str, Any]) -> None:
    class OneRank:
        def from_first_rank(self, value: Any) -> Any:
            return value

    made = plan(
        lambda: Module(blocks),
        torch.zeros(8, 4, WIDTH),
        layout={"pipeline_parallel_size": 4},
        schedule="auto",
        device_type="cpu",
        **settings,
    )
    module, of_run = Module(blocks), Settings("auto", None, None, **settings)
    found = blocks_of(module, of_run, 4)
    _, placement, schedule = placing.place_blocks(
        module,
        found,
        Layout.resolve(4, pipeline_parallel_size=4),
        of_run,
        candidates("auto", 4, None),
        OneRank(),
        CPU,  # type: ignore[arg-type]
    )
    assert made.schedule == schedule
    assert made.placement.counts == placement.counts
    assert blocks != 8 or made.schedule.stages == 8
    assert made.to_json()["choice"] == made.choice
    assert made.choice in str(made)
