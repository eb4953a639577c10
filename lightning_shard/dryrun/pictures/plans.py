"""Draws a plan: the step's timeline, memory over time, and memory by kind for each stage; or all on an HTML page."""

from __future__ import annotations

from pathlib import Path

from lightning_shard.dryrun.memory.peak import KINDS, StageMemory, usable
from lightning_shard.dryrun.pictures.drawing import Picture, save, stacked
from lightning_shard.dryrun.pictures.page import page
from lightning_shard.dryrun.pictures.timelines import (
    Curve,
    Unit,
    draw_balance,
    draw_curves,
    draw_timeline,
    gibibytes,
    percent,
    row_name,
)
from lightning_shard.dryrun.planned import Plan
from lightning_shard.dryrun.search.found import Found
from lightning_shard.pipeline.placement import seconds_text as seconds
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate


def pictures_of(plan: Plan, timeline: Timeline | None = None) -> list[Picture]:
    """Draw the timeline, memory over the step, and each stage's memory by kind at its peak.

    Args:
        plan: The plan.
        timeline: A step's timeline in seconds. Default: the plan's own; or, if it has none, one simulated from the
            stages' counted costs, with a backward of two forwards and no time for sends, in percent of the step.
    """
    if timeline is None and plan.time is not None:
        timeline = plan.time.timeline
    unit: Unit = seconds if timeline is not None else percent
    if timeline is None:
        costs = [float(stage.cost) for stage in plan.placement.stages] if plan.placement is not None else [1.0]
        whole = simulate(plan.schedule, Costs.of_forwards(costs)).duration
        timeline = simulate(plan.schedule, Costs.of_forwards([100 * cost / whole for cost in costs]))
    limit = usable(plan.device_memory) if plan.device_memory is not None else None
    pictures = []
    if plan.schedule.stages > 1:
        pictures.append(draw_timeline(timeline, unit=unit, title=_title(timeline, unit)))
    curves = [_curve(timeline, rank, stage) for rank, stage in enumerate(plan.stages)]
    base = [float(min(moment.total for moment in stage.moments)) for stage in plan.stages]
    left_out = ", and what isn't known" if plan.unknown else ""
    most = f"at {'least' if left_out else 'most'} {gibibytes(plan.peak_bytes)} on a rank{left_out}"
    title = f"Memory over the step: {most}"
    pictures.append(draw_curves(timeline, curves, base, "what a step adds", limit, unit=unit, title=title))
    at_peak = {kind: [float(stage.peak.bytes.get(kind, 0)) for stage in plan.stages] for kind in KINDS}
    shown = {kind: values for kind, values in at_peak.items() if any(values)}
    title = f"What fills a device of each stage, at its peak{left_out}"
    names = [row_name(timeline, rank) for rank in range(len(plan.stages))]
    pictures.append(draw_balance(title, shown, limit=limit, names=names))
    return pictures


def save_pictures(plan: Plan, path: str | Path, timeline: Timeline | None = None) -> None:
    """Save all pictures in one ``.svg`` or ``.png`` file."""
    save(stacked(f"A plan of {plan.name}", pictures_of(plan, timeline)), path)


def save_page(plan: Plan, path: str | Path, timeline: Timeline | None = None) -> None:
    """Save the plan's table and pictures as an HTML page that needs no network."""
    made = page(
        f"A plan of {plan.name}",
        pictures_of(plan, timeline),
        text=str(plan),
        foot="By lightning-shard plan: reckoned, not measured.",
    )
    Path(path).write_text(made, encoding="utf-8")


def save_found(found: Found, html: str | None, picture: str | None) -> None:
    """Save what a search has found as an HTML page, and its fastest layout's timeline there or as a picture."""
    steps = [choice.step for choice in found.choices[:1] if choice.step is not None]
    pictures = [draw_timeline(step.timeline, title=f"The fastest: {_title(step.timeline, seconds)}") for step in steps]
    if html is not None:
        title = f"Layouts of {found.devices} × {found.device}"
        foot = "By lightning-shard plan --search: simulated, not measured."
        Path(html).write_text(page(title, pictures, text=str(found), foot=foot), encoding="utf-8")
    if picture is not None and pictures:
        save(pictures[0], picture)


def _title(timeline: Timeline, unit: Unit) -> str:
    schedule = timeline.schedule
    long = f", {unit(timeline.duration)}" if unit is seconds else ", on a clock of counted costs"
    return (
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches{long}:"
        f" {100 * timeline.bubble:.1f} % idle"
    )


def _curve(timeline: Timeline, rank: int, stage: StageMemory) -> Curve:
    """Memory over time: during each action its maximum, and after it what its last moment left."""
    most: dict[Action | None, int] = {}
    left: dict[Action | None, int] = {}
    for moment in stage.moments:
        most[moment.action] = max(most.get(moment.action, 0), moment.total)
        left[moment.action] = moment.total
    curve = [(0.0, float(min(moment.total for moment in stage.moments)))]
    for event in timeline.of(rank):
        if event.action in most:
            curve += [(event.start, float(most[event.action])), (event.end, float(left[event.action]))]
    if None in most:
        curve.append((timeline.duration, float(most[None])))
    return curve
