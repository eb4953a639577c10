"""What a pipeline did, as its watch saw it: the schedule's order, and costs that give the same timeline again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_shard import RecordTimeline
from lightning_shard.dryrun.record import write
from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.runtime import step as runtime
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.recorded import RecordedStep, Recording, Span, StopWatch, measured_costs
from lightning_shard.pipeline.schedules.simulate import Costs, simulate
from lightning_shard.testing import run_ranks
from tests.parity import Seen, layout, train
from tests.training import pipelines

CPU = torch.device("cpu")


class Network(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _step(root: nn.Module, batch: Any) -> Tensor:
    return root(batch).square().mean()


def recorded(monkeypatch: pytest.MonkeyPatch, schedule: str, stages: int, microbatches: int) -> list[list[Span]]:
    """Each rank's spans of two batches, of which the first finds out what crosses stages; one clock for all."""
    watches: list[StopWatch] = []

    class Watched(runtime.PipelinedStep):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.watch = StopWatch(CPU)
            watches.append(self.watch)

    monkeypatch.setattr(pipelines, "PipelinedStep", Watched)
    torch.manual_seed(0)
    parts = [torch.randn(2, 8) for _ in range(2 * microbatches)]
    pipelines.on_stages(Network, _step, parts, stages, schedule=schedule, microbatches=microbatches)
    for watch in watches:
        watch._zero = watches[0]._zero
    return [watch.spans() for watch in watches]


@pytest.mark.parametrize(("name", "stages"), [("1F1B", 2), ("1F1B", 3), ("GPipe", 3), ("Eager1F1B", 3)])
def test_the_runtime_runs_the_schedules_order_which_is_the_simulated_one(
    monkeypatch: pytest.MonkeyPatch, name: str, stages: int
) -> None:
    schedule = build(name, stages, 2 * stages)
    expected = simulate(schedule, Costs.of_forwards([1.0] * stages))
    seen = recorded(monkeypatch, name, stages, 2 * stages)
    by_rank = {schedule.rank_of[spans[0][0].stage]: spans for spans in seen}
    assert sorted(by_rank) == list(range(stages))
    for rank, spans in by_rank.items():
        both_batches = [action for action, *_ in spans if action is not None]
        assert tuple(both_batches) == 2 * schedule.rows[rank]
        assert tuple(both_batches[: len(both_batches) // 2]) == tuple(e.action for e in expected.of(rank))
        for _, began, start, end in spans:
            assert began <= start <= end
    second = {rank: spans[len(spans) // 2 :] for rank, spans in by_rank.items()}
    step = RecordedStep.of(name, second, step=1)
    assert step.timeline.schedule == schedule
    assert min(event.start for event in step.timeline.events) >= 0
    starts = {part: event.start for event in step.timeline.events for part in event.action.gives()}
    for event in step.timeline.events:  # none computes before what it needs has begun
        assert all(starts[need] <= event.start for need in event.action.needs(stages))
    assert step.timeline.duration > 0
    assert simulate(schedule, measured_costs([step.timeline])).duration > 0


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_simulations_own_costs_are_found_in_it_and_give_it_again(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    schedule = build(data.draw(st.sampled_from(sorted(SCHEDULES))), ranks, data.draw(st.integers(2 * ranks, 3 * ranks)))
    kinds = {action.kind for row in schedule.rows for action in row}
    assume(not {"B", "W"} <= kinds)
    costs = [
        [float(data.draw(st.integers(1, 9))) for _ in range(schedule.stages)] for _ in ("forward", "input", "weight")
    ]
    timeline = simulate(schedule, Costs(*costs, transfer=0.0))
    found = measured_costs([timeline])
    assert found.forward == pytest.approx(costs[0])
    again = simulate(schedule, found)
    assert [(e.rank, e.action) for e in again.events] == [(e.rank, e.action) for e in timeline.events]
    assert again.duration == pytest.approx(timeline.duration)


def recording() -> Recording:
    schedule = build("1F1B", 2, 3)
    steps = []
    for step, scale in enumerate((0.01, 0.012, 0.5), start=10):
        timeline = simulate(schedule, Costs([scale, 2 * scale], [scale] * 2, [0.0] * 2))
        spans = {rank: [(e.action, e.start, e.start, e.end) for e in timeline.of(rank)] for rank in range(2)}
        steps.append(RecordedStep.of("1F1B", spans, step=step, skew_s=1e-4))
        assert steps[-1].timeline.duration == timeline.duration
        assert {*steps[-1].timeline.events} == {*timeline.events}
    return Recording("cpu", steps)


def test_a_recording_is_read_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(recording().to_json())
    assert Recording.read(tmp_path / "timeline.json") == recording()


@pytest.mark.parametrize("text", ["", "{}", '{"format": "lightning_shard timeline", "version": 2}', "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigurationError, match="no timeline that this version recorded"):
        Recording.read(tmp_path / "other.json")


def test_what_is_written_shows_the_median_step_beside_its_simulation(tmp_path: Path) -> None:
    write(recording(), tmp_path / "new")
    html = (tmp_path / "new" / "timeline.html").read_text()
    assert "1F1B, batch 11, as it ran" in html
    assert html.count("0F0: forward of stage 0, microbatch 0") == 2
    assert "The step took 1.00 times" in html
    trace = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == 2 * 2 * 2 * 3
    assert (tmp_path / "new" / "timeline.json").is_file()


@pytest.mark.parametrize("wrong", [{"after": 0}, {"steps": 0}])
def test_a_first_step_cant_be_recorded(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="must be at least 1"):
        RecordTimeline("timelines", **wrong)


def train_recorded(sizes: dict[str, int], folder: str) -> Seen:
    return train("gpt", sizes, steps=4, callbacks=[RecordTimeline(folder, after=1, steps=2)])


@pytest.mark.long
def test_two_steps_of_a_run_are_recorded_in_the_schedules_order(tmp_path: Path) -> None:
    run_ranks(train_recorded, 2, layout(pipeline=2), str(tmp_path), elastic=True)
    recording = Recording.read(tmp_path / "timeline.json")
    assert [(r.step, r.data_rank, r.tensor_rank) for r in recording.steps] == [(1, 0, 0), (2, 0, 0)]
    for recorded in recording.steps:
        assert recorded.timeline.schedule == build("1F1B", 2, 4)
        assert 0 < recorded.timeline.bubble < 1
        assert recorded.skew_s >= 0
    assert (tmp_path / "trace.json").is_file()
    assert "1F1B, batch" in (tmp_path / "timeline.html").read_text()


def test_one_stage_has_nothing_to_record_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is one pipeline stage"):
        train_recorded(layout(), str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
