"""Schedules: complete, runnable in every stage's order, and as lean as they claim."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedule import SCHEDULES, Action, check_schedule, order

pipelines = st.integers(1, 6).flatmap(lambda stages: st.tuples(st.just(stages), st.integers(stages, 14)))


@given(name=st.sampled_from(sorted(SCHEDULES)), pipeline=pipelines)
def test_every_stage_can_run_its_actions_in_order(name: str, pipeline: tuple[int, int]) -> None:
    stages, microbatches = pipeline
    waiting = [order(name, stage, stages, microbatches) for stage in range(stages)]
    done: list[set[Action]] = [set() for _ in range(stages)]
    assert all(sorted(actions) == sorted(set(actions)) and len(actions) == 2 * microbatches for actions in waiting)
    while any(waiting):
        ready = [stage for stage in range(stages) if waiting[stage] and _can_run(waiting[stage][0], stage, done)]
        assert ready, "deadlock"
        for stage in ready:
            done[stage].add(waiting[stage].pop(0))


def _can_run(action: Action, stage: int, done: list[set[Action]]) -> bool:
    if action.kind == "F":
        return stage == 0 or action in done[stage - 1]
    own = Action("F", action.microbatch) in done[stage]
    return own and (stage == len(done) - 1 or action in done[stage + 1])


@given(pipeline=pipelines)
def test_1f1b_holds_at_most_as_many_microbatches_as_stages_remain(pipeline: tuple[int, int]) -> None:
    stages, microbatches = pipeline
    for stage in range(stages):
        alive = most = 0
        for action in order("1F1B", stage, stages, microbatches):
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
        assert most == min(stages - stage, microbatches)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "says"),
    [("1F", 2, 4, "isn't one of"), ("1F1B", 4, 3, "must be at least"), ("GPipe", 2, 0, "integer of at least 1")],
)
def test_what_cant_run_is_refused(name: str, stages: int, microbatches: int, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_schedule(name, stages, microbatches)
