"""The simulated step: what can be computed by hand, and what must hold for all costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, simulate

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


@pytest.mark.parametrize("forward", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_costs_that_arent_of_the_stages_are_refused(forward: list[float]) -> None:
    with pytest.raises(ConfigurationError, match="finite number of at least 0 for each of the 2 stages of 1F1B"):
        simulate(build("1F1B", 2), Costs(forward, [1.0, 1.0], [1.0, 1.0]))
