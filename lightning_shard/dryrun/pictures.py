"""Timelines as a trace that Perfetto (https://ui.perfetto.dev) opens, and as one page for a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning_shard.arguments import seconds_text
from lightning_shard.dryrun.memory.peak import StageMemory
from lightning_shard.dryrun.planned import Plan
from lightning_shard.dryrun.search.found import Found
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

KINDS: Mapping[str, str] = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
Curve = Sequence[tuple[float, int]]
"""A step function: (time in seconds, bytes from then on)."""
_WIDTH, _LEFT, _ROW = 1000, 110, 24  # pixels
_STYLE = """
:root{color-scheme:light dark} body{margin:24px;font:15px/1.5 system-ui,sans-serif}
pre{overflow-x:auto;font:12px/1.5 ui-monospace,monospace} svg{width:100%;min-width:800px} div{overflow-x:auto}
text{font-size:11px;fill:currentColor} .idle{fill:#8883} .F{fill:#4c8dd6} .B{fill:#e8853d}
.I{fill:#f0b429} .W{fill:#5aa469} svg.key{width:12px;min-width:0}
"""


def trace(timelines: Mapping[str, Timeline], memory: Sequence[Curve] = ()) -> dict[str, Any]:
    """Timelines in the Trace Event Format: a process for each, with a thread for each pipeline rank; in microseconds.

    Args:
        timelines: By name.
        memory: Of each rank of the first timeline; becomes counters, in bytes.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in range(len(timeline.schedule.rows)):
            row = {"name": _row_name(timeline, rank)}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": row})
        for event in timeline.events:
            facts = {"stage": event.action.stage, "microbatch": event.action.microbatch}
            times = {"ts": 1e6 * event.start, "dur": 1e6 * (event.end - event.start)}
            kind = KINDS[event.action.kind]
            place = {"pid": process, "tid": event.rank}
            events.append({"ph": "X", "name": str(event.action), "cat": kind, **place, **times, "args": facts})
    for rank, curve in enumerate(memory):
        name = f"memory of rank {rank}"
        events += ({"ph": "C", "name": name, "pid": 0, "ts": 1e6 * time, "args": {"bytes": n}} for time, n in curve)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def page(title: str, text: str, timelines: Mapping[str, Timeline], foot: str) -> str:
    """An HTML page of a text and of timelines on one scale, which needs neither scripts nor a network."""
    until = max((timeline.duration for timeline in timelines.values()), default=0.0) or 1.0
    parts = [f"<h1>{escape(title)}</h1><pre>{escape(text)}</pre>"]
    for name, timeline in timelines.items():
        parts += [f"<h2>{escape(name)}</h2><div>", *_svg(timeline, until), "</div>"]
    kinds = dict.fromkeys(e.action.kind for timeline in timelines.values() for e in timeline.events)
    boxes = (
        f'<svg class="key" viewBox="0 0 12 12">{_rect(kind, 0, 0, 12)}</rect></svg> {KINDS[kind]}' for kind in kinds
    )
    parts += [f"<p>{' · '.join(boxes)}</p>"]
    head = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return f"{head}<style>{_STYLE}</style></head><body>\n{body}\n<p>{escape(foot)}</p></body></html>\n"


def summary(timeline: Timeline) -> str:
    return f"{seconds_text(timeline.duration)}, {100 * timeline.bubble:.1f} % idle"


def _svg(timeline: Timeline, until: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT) / until
    rows = len(timeline.schedule.rows)
    yield f'<svg viewBox="0 0 {_WIDTH} {rows * _ROW}" role="img">'
    for rank in range(rows):
        yield f'<text x="0" y="{rank * _ROW + 15}">{_row_name(timeline, rank)}</text>'
        yield _rect("idle", _LEFT, rank, scale * timeline.duration) + "</rect>"
    for event in timeline.events:
        action, times = event.action, f"{seconds_text(event.start)} to {seconds_text(event.end)}"
        tip = f"{action}: {KINDS[action.kind]} of stage {action.stage}, microbatch {action.microbatch}, {times}"
        box = _rect(action.kind, _LEFT + scale * event.start, event.rank, 0.97 * scale * (event.end - event.start))
        yield f"{box}<title>{tip}</title></rect>"
    yield "</svg>"


def _rect(kind: str, x: float, rank: int, width: float) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{rank * _ROW}" width="{width:.2f}" height="{_ROW - 4}">'


def _row_name(timeline: Timeline, rank: int) -> str:
    """A pipeline rank's name, by its stages, since its number differs from global ranks."""
    stages = timeline.schedule.stages_of(rank)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def timelines_of(made: Plan | Found) -> dict[str, Timeline]:
    """The step of a plan, or of a search's fastest layout; without a device on a clock of counted costs, of 100 ms."""
    if isinstance(made, Found):
        steps = [choice.step for choice in made.choices[:1] if choice.step is not None]
        return {f"the fastest: {_said(step.timeline)}": step.timeline for step in steps}
    if made.time is not None:
        return {_said(made.time.timeline): made.time.timeline}
    costs = [float(stage.cost) for stage in made.placement.stages] if made.placement is not None else [1.0]
    whole = simulate(made.schedule, Costs.of_forwards(costs)).duration
    timeline = simulate(made.schedule, Costs.of_forwards([0.1 * cost / whole for cost in costs]))
    return {f"{_said(timeline)}, on a clock of counted costs": timeline}


def save(made: Plan | Found, html: str | None, trace_path: str | None) -> None:
    """Write a plan, or what a search has found, as a page and as a trace, where a path is given."""
    timelines = timelines_of(made)
    if html is not None:
        title = f"A plan of {made.name}" if isinstance(made, Plan) else f"Layouts of {made.devices} × {made.device}"
        text = page(title, str(made), timelines, "By lightning-shard plan: reckoned, not measured.")
        Path(html).write_text(text, encoding="utf-8")
    if trace_path is not None:
        memory = []
        if isinstance(made, Plan):
            (timeline,) = timelines.values()
            memory = [_curve(timeline, rank, stage) for rank, stage in enumerate(made.stages)]
        Path(trace_path).write_text(json.dumps(trace(timelines, memory)), encoding="utf-8")


def _said(timeline: Timeline) -> str:
    order = timeline.schedule
    return f"{order.name}, {order.stages} stages, {order.microbatches} microbatches, {summary(timeline)}"


def _curve(timeline: Timeline, rank: int, stage: StageMemory) -> Curve:
    """Memory over time: during each action its maximum, and after it what its last moment left."""
    most: dict[Action | None, int] = {}
    left: dict[Action | None, int] = {}
    for moment in stage.moments:
        most[moment.action] = max(most.get(moment.action, 0), moment.total)
        left[moment.action] = moment.total
    curve = [(0.0, min(moment.total for moment in stage.moments))]
    for event in timeline.of(rank):
        if event.action in most:  # else a backward's second part that has nothing to do
            curve += [(event.start, most[event.action]), (event.end, left[event.action])]
    return [*curve, (timeline.duration, most[None])]
