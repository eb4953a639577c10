"""Training steps as bars: what ours takes of the time and the memory of the same by hand, or under another strategy."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path

from benchmarks.lib.picture import pyplot_if_installed
from benchmarks.lib.report import Row

OURS = "hybrid_shard"
LESS, MORE, LINE = "#d9480f", "#868e96", "#212529"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG; where matplotlib isn't installed, say so."""
    pyplot = pyplot_if_installed()
    if pyplot is None:
        return
    own = {row.what: row for row in rows if row.contender == OURS}
    others = [row for row in reversed(rows) if row.contender != OURS]
    names = [f"{row.what}  /  {row.contender}" for row in others]
    figure, places = pyplot.subplots(1, 2, figsize=(13, 0.3 * len(others) + 1.2), sharey=True, layout="constrained")
    figures = {
        "step time": [1 / (row.ours_is or nan) for row in others],
        "peak of tensors' bytes": [(own[row.what].mib or nan) / (row.mib or nan) for row in others],
    }
    for place, (title, ratios) in zip(places, figures.items()):
        colors = [LESS if ratio <= 1 else MORE for ratio in ratios]
        place.barh(names, [ratio - 1 for ratio in ratios], left=1, color=colors, height=0.7)
        for number, ratio in enumerate(ratios):
            place.text(max(ratio, 1) + 0.01, number, f"{ratio:.3f}×", va="center", fontsize=8)
        place.axvline(1, color=LINE, linewidth=1)
        place.set_xlim(min(0.7, *ratios) - 0.02, max(1.2, *ratios) + 0.1)
        place.set_title(title, loc="left", fontsize=10, fontweight="bold")
        place.set_xticks([])
        place.tick_params(axis="y", length=0, labelsize=8)
        for side in place.spines.values():
            side.set_visible(False)
    figure.suptitle(
        "hybrid_shard as a multiple of  /  …: shorter is better, orange where it takes no more", fontsize=10
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(path)
