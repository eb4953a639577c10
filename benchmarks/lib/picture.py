"""Rows as bars of GB/s, a panel per question."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Row

OURS, RAW, OTHERS = "#d9480f", "#495057", "#adb5bd"
PANELS_PER_LINE = 2
BAR_INCHES, TITLE_INCHES = 0.27, 0.35


def pyplot_if_installed() -> Any:
    """Matplotlib's, for files; ``None`` where it isn't installed, which is said."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG; where matplotlib isn't installed, say so."""
    pyplot = pyplot_if_installed()
    if pyplot is None:
        return
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row.gb_per_s is not None:
            panels.setdefault(row.what, []).append(row)
    if not panels:
        return
    lines = [list(panels.items())[i : i + PANELS_PER_LINE] for i in range(0, len(panels), PANELS_PER_LINE)]
    most = [max(len(bars) for _, bars in line) for line in lines]
    heights = [bars * BAR_INCHES + TITLE_INCHES for bars in most]
    figure, axes = pyplot.subplots(
        len(lines),
        PANELS_PER_LINE,
        figsize=(14, sum(heights) + TITLE_INCHES),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle("GB/s, more is better; in orange this package, dark what it is measured against", fontsize=10)
    for line, places, bars in zip(lines, axes, most):
        for place, panel in itertools.zip_longest(places, line):
            place.set_axis_off()
            if panel is not None:
                _panel(place, *panel, room_for=bars)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(path)


def _panel(axes: Any, what: str, rows: list[Row], room_for: int) -> None:
    rows = sorted(rows, key=_speed)
    fastest = max(map(_speed, rows))
    reference = max((_speed(row) for row in rows if row.is_reference), default=None)
    if reference is not None:
        axes.axvline(reference, color=RAW, linestyle=":", linewidth=1, zorder=0)
    colors = [
        OURS if row.contender.startswith("lightning_shard") else RAW if row.is_reference else OTHERS for row in rows
    ]
    bars = axes.barh([row.contender for row in rows], [_speed(row) for row in rows], color=colors, height=0.72)
    on_white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=8, bbox=on_white)
    axes.set_axis_on()
    axes.set_title(what, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlim(0, fastest * 1.1)
    axes.set_ylim(len(rows) - room_for - 0.5, len(rows) - 0.5)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def _speed(row: Row) -> float:
    return row.gb_per_s or 0.0
