"""A step as a page and as a trace: each action is there, at its time, and a page needs nothing but itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard import cli, plan
from lightning_shard.dryrun.pictures import page, save, trace
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate
from tests.paths import ROOT
from tests.planner.test_planned import with_batch


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    ranks = draw(st.integers(1, 4))
    schedule = build(draw(st.sampled_from(sorted(SCHEDULES))), ranks, draw(st.integers(2 * ranks, 3 * ranks)))
    costs = [float(draw(st.integers(0, 9))) for _ in range(schedule.stages)]
    return simulate(schedule, Costs.of_forwards(costs, draw(st.sampled_from([0.0, 1.5]))))


@settings(max_examples=15, deadline=None)
@given(timeline=timelines())
def test_each_action_is_in_the_trace_and_on_the_page_once(timeline: Timeline) -> None:
    boxes = [event for event in trace({"a step": timeline})["traceEvents"] if event["ph"] == "X"]
    found = sorted((box["tid"], box["name"], box["ts"], box["dur"]) for box in boxes)
    assert found == sorted((e.rank, str(e.action), 1e6 * e.start, 1e6 * (e.end - e.start)) for e in timeline.events)
    tips = re.findall(r"<title>(\w+): ", page("A step", "", {"a step": timeline}, ""))
    assert sorted(tips) == sorted(str(event.action) for event in timeline.events)


def test_a_page_needs_no_network_and_takes_no_markup_from_its_text() -> None:
    timeline = simulate(build("1F1B", 2, 3), Costs.of_forwards([1.0, 1.0]))
    html = page("A <b> & c", "a < b", {"<i>": timeline}, "<p>")
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(|https?:", html)
    for text in ("A &lt;b&gt; &amp; c", "a &lt; b", "&lt;i&gt;", "&lt;p&gt;"):
        assert text in html


@pytest.mark.parametrize("more", [{}, {"device": "h100"}, {"schedule": "ZBVZeroBubble"}])
def test_a_plans_trace_has_each_ranks_memory_with_its_peak(more: dict[str, str], tmp_path: Path) -> None:
    made = plan(*with_batch(), layout={"pipeline_parallel_size": 2}, **more)  # type: ignore[arg-type]
    save(made, None, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank, stage in enumerate(made.stages):
        curve = [event["args"]["bytes"] for event in events if event["name"] == f"memory of rank {rank}"]
        assert max(curve) == stage.peak.total


def test_the_command_writes_a_page_and_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    html, perfetto = tmp_path / "plan.html", tmp_path / "plan.json"
    verb = ["plan", "tests.planner.test_planned:with_batch", "--html", str(html), "--trace", str(perfetto)]
    for stages in ("1", "2"):
        assert cli.main([*verb, "--pipeline", stages]) == 0
        assert "reckoned, not measured" in html.read_text()
        assert json.loads(perfetto.read_text())["traceEvents"]
