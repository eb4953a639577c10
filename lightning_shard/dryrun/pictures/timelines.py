"""Draws a schedule's step: the timeline of ranks, each rank's memory over time, and the balance of stages.

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
"""Target for the average width of an action, within the picture's smallest and largest width."""
CHAR_PIXELS = 6.6
"""Assumed width of a digit, since the font isn't known."""
MOST_SENDS = 4000
"""More sends aren't drawn, since so many lines would only be a grey area."""
FAR = 2.0
"""A limit above so many times the largest value is written, not drawn, since it would flatten everything else."""

KINDS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("input", "backward, inputs"),
    "W": ("weight", "backward, weights"),
}
"""By an action's kind: its colour and its name."""
Curve = Sequence[tuple[float, float]]
"""A step function: (time, bytes from then on)."""
Unit = Callable[[float], str]
"""Formats a number as text."""


def percent(value: float) -> str:
    """The unit of a timeline whose seconds aren't known: percent of the step."""
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
    """Draw ranks over time: a box per action with its microbatch's number, grey for idle time, lines for sends.

    Args:
        timeline: The timeline.
        title: Default: the schedule's name, duration and idle share.
        transfer: The duration of a send, in the timeline's unit; a line is drawn from the end of the sending action to
            the arrival. Default: to the begin of the receiving action, as in a recorded step.
        unit: Formats the timeline's numbers.
        until: The end of the time axis, so that two pictures can have the same scale. Default: the step's duration.
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
    """A rank's activation memory over the step, as a step function.

    A microbatch's activations count from the start of its forward to the end of its backward (its weights' part, if
    split).

    Args:
        timeline: The timeline.
        rank: The pipeline rank.
        activation_bytes: Bytes of one microbatch, by stage.

    Raises:
        ConfigurationError: ``activation_bytes`` hasn't one number per stage.
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
    for time, change in sorted(changes):  # at equal times, frees come first
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
    """Draw each rank's memory over the step: the curve of its activations, above what it holds all the time.

    Args:
        timeline: The timeline.
        activation_bytes: Bytes of one microbatch, by stage.
        base_bytes: By stage: parameters, gradients, optimizer states and so on. Default: nothing.
        limit_bytes: A device's memory, drawn as a line.
        title: Default: the peak.
        unit: Formats the timeline's numbers.
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
    """Draw bytes over the step, by rank.

    Args:
        timeline: The timeline.
        curves: Each rank's total bytes over time.
        base_bytes: Each rank's bytes that it holds all the time, included in its curve.
        above: The name of the rest.
        limit_bytes: A device's memory, drawn as a line.
        title, unit, until: As for :func:`draw_memory`.
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
    """Draw a stacked bar for each stage, to compare the stages.

    Args:
        title: The picture's title.
        kinds: By name of a part: its amount for each stage. Names in
            :data:`~lightning_shard.dryrun.pictures.drawing.COLORS` have that colour.
        unit: Formats amounts.
        limit: The largest amount that fits, drawn as a line.
        names: The names of the bars. Default: ``stage 0`` and so on.
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
    """A pipeline rank's name, by its stages, since its number differs from global ranks, which a plan also shows."""
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
    # if a rank has several stages, later ones are paler
    opacity = 1.0 if len(stages) == 1 else 1.0 - 0.5 * stages.index(action.stage) / (len(stages) - 1)
    shapes: list[Rect | Text] = [Rect(left, top, right - left - gap, ROW, color, tip, opacity)]
    label = str(action.microbatch)
    if len(label) * CHAR_PIXELS + 2 <= right - left - gap:
        middle = (left + right - gap) / 2
        shapes.append(Text(middle, top + ROW / 2, label, "on color" if opacity == 1 else "ink", "middle"))
    return shapes


def _sends(timeline: Timeline, transfer: float | None) -> list[tuple[int, int, float, float]]:
    """All sends: (source rank, target rank, departure, arrival)."""
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
    """The limit, if it is near enough to be drawn."""
    return limit if limit and limit <= FAR * most else None


def _tell_far(picture: Picture, limit: str) -> None:
    """Write a limit that is too far to be drawn."""
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
    """About ``count`` round numbers from 0 to ``most``, at distances of 1, 2 or 5 times a power of ten."""
    rough = most / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def _colors(names: Mapping[str, object]) -> list[str]:
    spare = itertools.cycle(color for color in ("other", "send", "input", "weight") if color not in names)
    return [name if name in COLORS else next(spare) for name in names]
