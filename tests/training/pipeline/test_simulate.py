"""The simulated step: what can be computed by hand, and what must hold for all costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Action, Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

times = st.integers(1, 20).map(float)
NAMES = sorted(SCHEDULES)
some = settings(max_examples=40)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    ranks = draw(st.integers(1, 4))
    schedule = build(draw(st.sampled_from(NAMES)), ranks, draw(st.integers(2 * ranks, 3 * ranks)))
    of_stages = st.lists(times, min_size=schedule.stages, max_size=schedule.stages)
    costs = Costs(draw(of_stages), draw(of_stages), draw(of_stages), draw(st.sampled_from([0.0, 1.0, 7.0])))
    return schedule, costs


def even(name: str, ranks: int, microbatches: int, transfer: float = 0.0) -> Timeline:
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, Costs.of_forwards([1.0] * schedule.stages, transfer))


def test_two_stages_by_hand() -> None:
    timeline = simulate(build("1F1B", 2, 2), Costs([1, 2], [1, 2], [2, 2], transfer=0.5))
    assert [(str(event.action), event.start, event.end) for event in timeline.of(0)] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B0", 8, 11),
        ("0B1", 14, 17),
    ]
    assert [(str(event.action), event.start, event.end) for event in timeline.of(1)] == [
        ("1F0", 1.5, 3.5),
        ("1B0", 3.5, 7.5),
        ("1F1", 7.5, 9.5),
        ("1B1", 9.5, 13.5),
    ]
    assert timeline.duration == 17
    assert (timeline.idle(0), timeline.idle(1)) == (9, 5)
    assert timeline.bubble == pytest.approx(14 / 34)
    assert timeline.in_flight == 2
    assert str(timeline) == "1F1B: 41.2 % idle, at most 2 microbatches in flight"


def test_the_first_part_of_a_backward_lets_the_stage_before_go_on() -> None:
    split = Schedule(
        "split",
        (
            (Action(0, "F", 0), Action(0, "B", 0)),
            (Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)),
        ),
    )
    costs = Costs.of_forwards([1.0, 1.0])
    assert simulate(split, costs).duration == 5  # 0F 1F 1I 0B, beside 1W
    assert simulate(build("GPipe", 2, 2).first(1), costs).duration == 6


@some
@given(pipeline=pipelines())
def test_every_action_starts_when_its_rank_is_free_and_what_it_needs_has_arrived(
    pipeline: tuple[Schedule, Costs],
) -> None:
    schedule, costs = pipeline
    timeline = simulate(schedule, costs)
    end = {part: event for event in timeline.events for part in event.action.gives()}
    assert [tuple(e.action for e in timeline.of(rank)) for rank in range(len(schedule.rows))] == [*schedule.rows]
    for rank in range(len(schedule.rows)):
        free = 0.0
        for event in timeline.of(rank):
            needed = [end[need] for need in event.action.needs(schedule.stages)]
            arrived = [e.end + (costs.transfer if e.rank != rank else 0) for e in needed]
            assert event.start == max(free, *arrived, 0)  # neither before, nor idle without a reason
            assert event.end == event.start + costs.of(event.action)
            free = event.end


@some
@given(pipeline=pipelines())
def test_a_step_takes_as_long_as_its_busiest_rank_at_least_and_as_one_after_the_other_at_most(
    pipeline: tuple[Schedule, Costs],
) -> None:
    schedule, costs = pipeline
    timeline = simulate(schedule, costs)
    busy = [sum(costs.of(action) for action in row) for row in schedule.rows]
    moves = sum(schedule.rank_of[s] != schedule.rank_of[s + 1] for s in range(schedule.stages - 1))
    assert max(busy) <= timeline.duration <= sum(busy) + 2 * moves * costs.transfer * schedule.microbatches
    assert 0 <= timeline.bubble < 1
    assert timeline.bubble == pytest.approx(1 - sum(busy) / (len(busy) * timeline.duration))


@some
@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 5), more=st.integers(0, 9))
def test_more_microbatches_never_lower_the_efficiency(name: str, ranks: int, more: int) -> None:
    few, many = even(name, ranks, 2 * ranks + more), even(name, ranks, 2 * ranks + more + 1)
    assert many.bubble <= few.bubble + 1e-9


@some
@given(
    name=st.sampled_from(["1F1B", "GPipe"]),
    stages=st.lists(st.tuples(times, times), min_size=1, max_size=5),
    more=st.integers(0, 9),
)
def test_nor_do_they_where_stages_differ(name: str, stages: list[tuple[float, float]], more: int) -> None:
    """Without transfers: where these take several times as long as a stage, 1F1B's efficiency goes up and down."""
    forward, backward = zip(*stages)
    costs = Costs(forward, backward, backward)
    few, many = (simulate(build(name, len(stages), len(stages) + more + i), costs) for i in range(2))
    assert many.bubble <= few.bubble + 1e-9


@some
@given(pipeline=pipelines(), more=times, stage=st.integers(0, 100))
def test_no_action_starts_earlier_where_one_costs_more(
    pipeline: tuple[Schedule, Costs], more: float, stage: int
) -> None:
    schedule, costs = pipeline
    assert isinstance(costs.transfer, float)
    slower = [*costs.forward]
    slower[stage % schedule.stages] += more
    before = simulate(schedule, costs)
    after = simulate(schedule, Costs(slower, costs.backward_input, costs.backward_weight, costs.transfer + more))
    starts = {event.action: event.start for event in before.events}
    assert all(event.start >= starts[event.action] for event in after.events)


def test_bubbles_are_those_of_the_papers() -> None:
    assert even("1F1B", 4, 8).bubble == pytest.approx(3 / (8 + 3))
    assert even("GPipe", 4, 8).bubble == pytest.approx(3 / (8 + 3))
    assert even("Interleaved1F1B", 4, 8).bubble == pytest.approx(3 / (2 * 8 + 3))
    for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert even(name, 4, 8).idle(0) == 3  # one forward for each rank that the first microbatch passes
        assert even(name, 4, 8).duration == 3 * 2 * 8 + 3


def test_forwards_ahead_help_where_stages_differ() -> None:
    costs = Costs.of_forwards([3.0, 2.0])
    usual, eager = (simulate(build(name, 2, 4), costs).duration for name in ("1F1B", "Eager1F1B"))
    assert (usual, eager) == (39, 36)  # the first stage's 4 × 9; 1F1B waits 3 for its first gradient


def test_each_cut_may_have_a_transfer_of_its_own() -> None:
    order = build("GPipe", 3, 3).first(1)
    costs = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, transfer=[0.25, 4.0])
    assert simulate(order, costs).duration == 9 + 2 * 4.25
    with pytest.raises(ConfigurationError, match="one for each of the 2 cuts"):
        simulate(order, Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, transfer=[1.0]))


def test_a_receive_that_begins_late_keeps_its_rank_waiting() -> None:
    """Stage 1 computes microbatch 0 while microbatch 1 arrives, or takes it up only then."""
    order = build("GPipe", 2, 2)
    early = Costs([1.0, 2.0], [0.0] * 2, [0.0] * 2, transfer=1.0)
    late = Costs([1.0, 2.0], [0.0] * 2, [0.0] * 2, transfer=1.0, receives_late=True)
    starts = [[event.start for event in simulate(order, costs).of(1)[:2]] for costs in (early, late)]
    assert starts == [[2, 4], [2, 5]]
    assert simulate(order, late).idle(1) == simulate(order, late).duration - 4  # to receive isn't to compute


@some
@given(pipeline=pipelines())
def test_to_receive_late_is_never_faster(pipeline: tuple[Schedule, Costs]) -> None:
    schedule, costs = pipeline
    late = replace(costs, receives_late=True)
    assert simulate(schedule, late).duration >= simulate(schedule, costs).duration


def test_what_a_single_action_costs_is_of_that_one_alone() -> None:
    order = build("1F1B", 2, 2)
    costs = Costs.of_forwards([1.0, 1.0])
    more = replace(costs, once={Action(0, "B", 1): 5.0})
    assert simulate(order, more).duration == simulate(order, costs).duration + 5


def test_a_pipeline_of_many_stages_is_simulated_in_linear_time() -> None:
    """Each action is looked at once, and once more for each that it waits for."""
    order = build("1F1B", 64, 128)
    looked = 0

    class Counted(Action):
        def needs(self, stages: int) -> tuple[Action, ...]:
            nonlocal looked
            looked += 1
            return super().needs(stages)

    counted = Schedule("counted", tuple(tuple(Counted(*action) for action in row) for row in order.rows))
    actions = sum(map(len, order.rows))
    assert sum(1 for _ in counted.walk()) == actions
    assert looked <= 4 * actions


@pytest.mark.parametrize("forward", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_costs_that_arent_of_the_stages_are_refused(forward: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="finite number of at least 0 for each of the 2 stages of 1F1B"):
        simulate(build("1F1B", 2), Costs(forward, [1.0, 1.0], [1.0, 1.0]))


def test_stages_that_cost_nothing_are_no_bubble() -> None:
    assert simulate(build("1F1B", 2), Costs.of_forwards([0.0, 0.0])).bubble == 0
