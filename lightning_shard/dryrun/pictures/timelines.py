"""Pictures of a schedule's step: who computes when, what each rank keeps meanwhile, how even the stages are.

Pure functions of a :class:`~lightning_shard.pipeline.schedules.simulate.Timeline`, simulated or recorded, and of
numbers by stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from lightning_shard.dryrun.pictures.drawing import COLORS, FONT_SIZE, Line, Picture, Rect, Text
from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.placement import seconds_text as seconds
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.pipeline.schedules.simulate import Event, Timeline

WIDTH, MOST_WIDTH = 1000, 3600
LEFT, RIGHT, TOP, BOTTOM = 150, 130, 46, 26
ROW, ROW_GAP = 24, 6
MEMORY_ROW = 44
BAR = 18
ACTION_PIXELS = 20
"""A picture is so wide that an action has this on average, where it may be."""
CHAR_PIXELS = 6.6
"""A digit's width, as text is measured where no font is known."""
MOST_SENDS = 4000
"""More lines than these are a grey ground."""
FAR = 2.0
"""A limit of more than so often the most that is drawn is told, and not drawn: it would flatten the rest."""

KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("input", "backward, inputs"),
    "W": ("weight", "backward, weights"),
}
"""An action's kind: its colour, and what it is called."""
Curve = Sequence[tuple[float, float]]
"""From each time on, bytes."""
Unit = Callable[[float], str]
"""A number as text."""


def percent(value: float) -> str:
    """Of a step whose seconds aren't known."""
    return f"{value:.3g} %"


def gibibytes(value: float) -> str:
    for factor, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor * 999.5 / 1024:  # three digits: else 1020 KiB would be 1.02e+03
            return f"{value / factor:.3g} {name}"
    return f"{value:.0f} B"


def draw_timeline(
    timeline: Timeline,
    *,
    title: str = "",
    transfer: float | None = None,
    unit: Unit = seconds,
    until: float | None = None,
) -> Picture:
    """Ranks × time: an action a box with its microbatch's number, the grey between them is idle, lines are sends.

    Args:
        title: Default: the schedule's name, its duration and the share that is idle.
        transfer: How long a send takes, in the timeline's unit; a line goes from the end of what is sent to its
            arrival. Default: to where what needs it begins, as in a recorded step.
        unit: Of the timeline's numbers, as text.
        until: The end of the time axis, so that two pictures have one scale. Default: the step's duration.
    """
    schedule = timeline.schedule
    ranks = range(len(schedule.rows))
    title = title or (
        f"{schedule.name}, {schedule.stages} stages, {schedule.microbatches} microbatches: {unit(timeline.duration)},"
        f" {100 * timeline.bubble:.1f} % idle"
    )
    picture = Picture(title, _width(timeline), TOP + len(ranks) * (ROW + ROW_GAP) + BOTTOM)
    scale = _TimeAxis(until or timeline.duration, picture.width)
    used = [kind for kind in KINDS if any(event.action.kind == kind for event in timeline.events)]
    _head(picture, [KINDS[kind] for kind in used] + [("idle", "idle"), ("send", "send")])
    top = {rank: TOP + number * (ROW + ROW_GAP) for number, rank in enumerate(ranks)}
    _time_ticks(picture, scale, unit)
    for rank in ranks:
        picture.add(
            Text(LEFT - 8, top[rank] + ROW / 2, row_name(timeline, rank), anchor="end"),
            Rect(LEFT, top[rank], scale(timeline.duration) - LEFT, ROW, "idle"),
        )
    for event in timeline.events:
        picture.add(*_box(event, timeline, scale, top[event.rank], unit))
    sends = [(*ends, top) for ends in _sends(timeline, transfer)]
    if len(sends) <= MOST_SENDS:
        for source, target, begin, end, _ in sends:
            down = top[target] > top[source]
            points = (
                (scale(begin), top[source] + (ROW if down else 0)),
                (scale(end), top[target] + (0 if down else ROW)),
            )
            picture.add(Line(points, "send", 0.8))
    for rank in ranks:
        idle = timeline.idle(rank) / timeline.duration if timeline.duration else 0.0
        picture.add(Text(picture.width - RIGHT + 8, top[rank] + ROW / 2, f"{100 * idle:.1f} % idle", "faint"))
    picture.facts = (
        ("row", "stage", "action", "microbatch", "starts", "ends"),
        [
            (
                row_name(timeline, e.rank),
                str(e.action.stage),
                KINDS[e.action.kind][1],
                str(e.action.microbatch),
                unit(e.start),
                unit(e.end),
            )
            for e in timeline.events
        ],
    )
    return picture


def kept(timeline: Timeline, rank: int, activation_bytes: Sequence[float]) -> list[tuple[float, float]]:
    """A rank's activations over the step: from each time on, bytes.

    A microbatch's are counted from the start of its forward to the end of its backward (of its weights' part).

    Args:
        activation_bytes: By stage, of one microbatch.

    Raises:
        ConfigurationError: They aren't of the schedule's stages.
    """
    if len(activation_bytes) != timeline.schedule.stages:
        raise ConfigurationError(
            f"activation_bytes ({[*activation_bytes]}) must be a number for each of the {timeline.schedule.stages}"
            f" stages of {timeline.schedule.name}."
        )
    changes = [(0.0, 0.0)]
    for event in timeline.of(rank):
        nbytes = activation_bytes[event.action.stage]
        if event.action.kind == "F":
            changes.append((event.start, nbytes))
        elif event.action.kind in "BW":
            changes.append((event.end, -nbytes))
    curve: list[tuple[float, float]] = []
    total = 0.0
    for time, change in sorted(changes):  # at one time, what is freed first
        total += change
        if curve and curve[-1][0] == time:
            curve.pop()
        curve.append((time, total))
    return curve


def draw_memory(
    timeline: Timeline,
    activation_bytes: Sequence[float],
    *,
    base_bytes: Sequence[float] = (),
    limit_bytes: float | None = None,
    title: str = "",
    unit: Unit = seconds,
    until: float | None = None,
) -> Picture:
    """What each rank keeps over the step: the curve of its activations, on what it holds all the time.

    Args:
        activation_bytes: By stage, of one microbatch.
        base_bytes: By stage: parameters, gradients, optimizer states and so on. Default: nothing.
        limit_bytes: A device's memory, as a line.
        unit: Of the timeline's numbers, as text.
        until: The end of the time axis. Default: the step's duration.
    """
    ranks = range(len(timeline.schedule.rows))
    stages = [timeline.schedule.stages_of(rank) for rank in ranks]
    base = [sum(base_bytes[stage] for stage in of_rank) if base_bytes else 0.0 for of_rank in stages]
    curves = [
        [(time, base[rank] + nbytes) for time, nbytes in kept(timeline, rank, activation_bytes)] for rank in ranks
    ]
    return draw_curves(timeline, curves, base, "activations", limit_bytes, title=title, unit=unit, until=until)


def draw_curves(
    timeline: Timeline,
    curves: Sequence[Curve],
    base_bytes: Sequence[float],
    above: str,
    limit_bytes: float | None = None,
    *,
    title: str = "",
    unit: Unit = seconds,
    until: float | None = None,
) -> Picture:
    """Bytes over the step, by rank.

    Args:
        curves: All that a rank holds, from each time on.
        base_bytes: What of it it holds all the time.
        above: What the rest is called.
        limit_bytes: A device's memory, as a line.
    """
    ranks = range(len(timeline.schedule.rows))
    peaks = [max(nbytes for _, nbytes in curve) for curve in curves]
    limit = _near(limit_bytes, max(peaks))
    most = max([*peaks, limit or 0.0]) or 1.0
    title = title or f"Memory over the step: at most {gibibytes(max(peaks))} on a rank"
    picture = Picture(title, _width(timeline), TOP + len(ranks) * (MEMORY_ROW + ROW_GAP) + BOTTOM)
    legend = [("activations", above)]
    legend += [("other", "held all the time")] if any(base_bytes) else []
    legend += [("limit", f"a device's {gibibytes(limit)}")] if limit else []
    _head(picture, legend)
    if limit_bytes and not limit:
        _tell_far(picture, gibibytes(limit_bytes))
    scale = _TimeAxis(until or timeline.duration, picture.width)
    _time_ticks(picture, scale, unit)
    for rank in ranks:
        bottom = TOP + rank * (MEMORY_ROW + ROW_GAP) + MEMORY_ROW

        def height(nbytes: float, bottom: float = bottom) -> float:
            return bottom - MEMORY_ROW * nbytes / most

        end, base = scale(timeline.duration), base_bytes[rank]
        picture.add(
            Rect(LEFT, bottom - MEMORY_ROW, end - LEFT, MEMORY_ROW, "idle"),
            Text(LEFT - 8, bottom - MEMORY_ROW / 2, row_name(timeline, rank), anchor="end"),
        )
        if base:
            tip = f"{row_name(timeline, rank)}: {gibibytes(base)} all the time"
            picture.add(Rect(LEFT, height(base), end - LEFT, bottom - height(base), "other", tip))
        points: list[tuple[float, float]] = []
        for time, nbytes in curves[rank]:
            points += [(scale(time), points[-1][1])] if points else []
            points.append((scale(time), height(nbytes)))
        points.append((end, points[-1][1]))
        tip = f"{row_name(timeline, rank)}: {gibibytes(peaks[rank] - base)} of {above} at the most"
        picture.add(Line(tuple(points), "activations", 1.2, filled=height(base), tip=tip))
        if limit:
            y = height(limit)
            picture.add(Line(((LEFT, y), (end, y)), "limit", 1, dashed=True))
        over = limit_bytes is not None and peaks[rank] > limit_bytes
        peak = f"peak {gibibytes(peaks[rank])}" + (" !" if over else "")
        picture.add(
            Text(picture.width - RIGHT + 8, bottom - MEMORY_ROW / 2, peak, "limit" if over else "faint", bold=over)
        )
    rows = [
        (
            row_name(timeline, rank),
            gibibytes(base_bytes[rank]),
            gibibytes(peaks[rank] - base_bytes[rank]),
            gibibytes(peaks[rank]),
        )
        for rank in ranks
    ]
    picture.facts = (("row", "held all the time", f"{above} at the most", "peak"), rows)
    return picture


def draw_balance(
    title: str,
    kinds: Mapping[str, Sequence[float]],
    *,
    unit: Unit = gibibytes,
    limit: float | None = None,
    names: Sequence[str] = (),
) -> Picture:
    """A bar for each stage, of parts: how even the stages are.

    Args:
        kinds: By what a part is called: its amount by stage. Names of
            :data:`~lightning_shard.dryrun.pictures.drawing.COLORS` have these colours.
        limit: The most that fits, as a line.
        names: What the bars are called. Default: ``stage 0`` and so on.
    """
    count = max(map(len, kinds.values()), default=0)
    if not count or any(len(values) != count for values in kinds.values()):
        raise ConfigurationError(
            f"kinds ({ {name: len(values) for name, values in kinds.items()} }) must have a number for each stage."
        )
    names = names or [f"stage {number}" for number in range(count)]
    totals = [sum(values[number] for values in kinds.values()) for number in range(count)]
    near = _near(limit, max(totals))
    most = max([*totals, near or 0.0]) or 1.0
    mean = sum(totals) / count
    picture = Picture(title, WIDTH, TOP + count * (BAR + ROW_GAP) + 8)
    colors = dict(zip(kinds, _colors(kinds)))
    _head(picture, [(colors[kind], kind) for kind in kinds] + ([("limit", f"limit {unit(near)}")] if near else []))
    if limit and not near:
        _tell_far(picture, unit(limit))
    room = picture.width - LEFT - RIGHT
    for number in range(count):
        y = TOP + number * (BAR + ROW_GAP)
        x = float(LEFT)
        picture.add(Text(LEFT - 8, y + BAR / 2, names[number], anchor="end"))
        for kind, values in kinds.items():
            width = room * values[number] / most
            tip = f"{names[number]}, {kind}: {unit(values[number])}"
            picture.add(Rect(x, y, width, BAR, colors[kind], tip))
            x += width
        share = f" ({totals[number] / mean:.2f}×)" if mean else ""
        picture.add(Text(picture.width - RIGHT + 8, y + BAR / 2, f"{unit(totals[number])}{share}", "faint"))
    if near:
        x = LEFT + room * near / most
        picture.add(Line(((x, TOP - 4), (x, TOP + count * (BAR + ROW_GAP))), "limit", 1, dashed=True))
    rows = [
        [names[number], *(unit(values[number]) for values in kinds.values()), unit(totals[number])]
        for number in range(count)
    ]
    picture.facts = (("row", *kinds, "in all"), rows)
    return picture


class _TimeAxis:
    def __init__(self, duration: float, width: float) -> None:
        self.duration = duration or 1.0
        self._pixels = (width - LEFT - RIGHT) / self.duration

    def __call__(self, time: float) -> float:
        return LEFT + time * self._pixels


def _width(timeline: Timeline) -> float:
    longest = max(map(len, timeline.schedule.rows))
    return min(max(WIDTH, LEFT + RIGHT + longest * ACTION_PIXELS), MOST_WIDTH)


def row_name(timeline: Timeline, rank: int) -> str:
    """By its stages: a pipeline's ranks are other ones than the world's, whose numbers a plan tells beside them."""
    stages = timeline.schedule.stages_of(rank)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _box(event: Event, timeline: Timeline, scale: _TimeAxis, top: float, unit: Unit) -> list[Rect | Text]:
    action = event.action
    color, name = KINDS[action.kind]
    stages = timeline.schedule.stages_of(event.rank)
    left, right = scale(event.start), scale(event.end)
    gap = min(1.0, (right - left) / 4)
    what = f"{name} of stage {action.stage}, microbatch {action.microbatch}"
    tip = f"{action}: {what}, {unit(event.start)} to {unit(event.end)}"
    # where a rank has several stages, the later ones are paler
    opacity = 1.0 if len(stages) == 1 else 1.0 - 0.5 * stages.index(action.stage) / (len(stages) - 1)
    shapes: list[Rect | Text] = [Rect(left, top, right - left - gap, ROW, color, tip, opacity)]
    label = str(action.microbatch)
    if len(label) * CHAR_PIXELS + 2 <= right - left - gap:
        middle = (left + right - gap) / 2
        shapes.append(Text(middle, top + ROW / 2, label, "on color" if opacity == 1 else "ink", "middle"))
    return shapes


def _sends(timeline: Timeline, transfer: float | None) -> list[tuple[int, int, float, float]]:
    """From rank, to rank, when it leaves and when it is there."""
    schedule = timeline.schedule
    done: dict[Action, Event] = {part: event for event in timeline.events for part in event.action.gives()}
    found = []
    for event in timeline.events:
        for need in event.action.needs(schedule.stages):
            source = done.get(need)
            if source is None or need.stage == event.action.stage or source.rank == event.rank:
                continue
            begin = source.end
            found.append((source.rank, event.rank, begin, event.start if transfer is None else begin + transfer))
    return found


def _head(picture: Picture, legend: Sequence[tuple[str, str]]) -> None:
    picture.add(Text(12, 13, picture.title, size=13, bold=True))
    x = 12.0
    for color, name in legend:
        if color in ("send", "limit"):
            picture.add(Line(((x, 32), (x + 12, 32)), color, 1.2, dashed=color == "limit"))
        else:
            picture.add(Rect(x, 27, 12, 10, color))
        picture.add(Text(x + 16, 32, name, "faint"))
        x += 16 + len(name) * CHAR_PIXELS + 18


def _near(limit: float | None, most: float) -> float | None:
    """A limit, if it can be drawn beside what is held."""
    return limit if limit and limit <= FAR * most else None


def _tell_far(picture: Picture, limit: str) -> None:
    """Of a limit that is too far to be drawn."""
    picture.add(Text(picture.width - 12, 13, f"limit {limit}, not drawn", "limit", anchor="end"))


def _time_ticks(picture: Picture, scale: _TimeAxis, unit: Unit) -> None:
    bottom = picture.height - BOTTOM
    for time in ticks(scale.duration, int((picture.width - LEFT - RIGHT) / 90)):
        x = scale(time)
        picture.add(
            Line(((x, TOP - 4), (x, bottom)), "grid", 0.7),
            Text(x, bottom + 10, unit(time), "faint", "middle", FONT_SIZE - 1),
        )


def ticks(most: float, count: int) -> list[float]:
    """About so many round numbers from 0 to ``most``: 1, 2 or 5 times a power of ten apart."""
    rough = most / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def _colors(names: Mapping[str, object]) -> list[str]:
    spare = itertools.cycle(color for color in ("other", "send", "input", "weight") if color not in names)
    return [name if name in COLORS else next(spare) for name in names]
