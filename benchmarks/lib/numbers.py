"""The table and picture of docs/numbers.md, and the README's few rows, from the newest results of each benchmark.

::

    python -m benchmarks.lib.numbers    # writes all three
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README, PAGE, PICTURE = ROOT / "README.md", ROOT / "docs" / "numbers.md", ROOT / "docs" / "numbers.png"
HEADLINES = [
    ("a training step, dp2", "Lightning's ModelParallelStrategy"),
    ("a training step, tp2", "Lightning's ModelParallelStrategy"),
    ("a training step, pp2", "plain torch, by hand"),
    ("saving 1 GiB, 4 ranks, fsync", "raw writes and fsync"),
    ("saving 1 GiB, 4 ranks, fsync", "torch.distributed.checkpoint"),
    ("loading it, each byte verified", "raw reads"),
    ("loading it, each byte verified", "torch.distributed.checkpoint"),
    ("waiting for an asynchronous save", "torch.distributed.checkpoint"),
]
"""The README's rows, of CPU processes."""
BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->\n"
OURS = "lightning_shard"
OTHER_LAYOUT = "load what rows wrote, 4 ranks, warm page cache"
DCP = "torch DCP FileSystemWriter", "torch DCP FileSystemReader", "torch DCP async_save"


@dataclass(frozen=True)
class Comparison:
    """How fast ours is, as a multiple of what it is compared with."""

    what: str
    against: str
    speed: float


def newest(kind: str) -> dict[str, Any]:
    """The last result of a benchmark, by its file's date."""
    return json.loads(max(RESULTS.glob(f"{kind}-2*.json")).read_text())


def _speeds(rows: list[dict[str, Any]], what: str) -> dict[str, float]:
    """By contender; of the reference 1."""
    found = {row["contender"]: row for row in rows if row["what"] == what}
    compared = {name: row for name, row in found.items() if row.get("is_reference") or "of_reference" in row}
    return {name: row.get("of_reference", 1.0) for name, row in compared.items()}


def _checkpoints(rows: list[dict[str, Any]], names: dict[str, tuple[str, str, str]]) -> Iterator[Comparison]:
    for what, (shown, contender, reference) in names.items():
        if not (speeds := _speeds(rows, what)):
            continue  # not measured in that run
        yield Comparison(shown, reference, speeds[contender])
        for other in DCP:
            if other in speeds:
                yield Comparison(shown, "torch.distributed.checkpoint", speeds[contender] / speeds[other])


def comparisons() -> dict[str, list[Comparison]]:
    """By the machine and date they are of."""
    training, saving, device = newest("training"), newest("checkpoint"), newest("gpu")
    steps = [
        Comparison(f"a training step, {layout}", way, 1 / ratio)
        for layout, row in training["ours_over"].items()
        for way, ratio in row.items()
        if way != "hybrid_shard" and "," not in layout  # schedules and settings are in the result's own picture
    ]
    ours, asynchronous = OURS, f"{OURS}, asynchronous"
    on_disk = _checkpoints(
        saving["rows"],
        {
            "save, 4 ranks, with fsync": ("saving 1 GiB, 4 ranks, fsync", ours, "raw writes and fsync"),
            "save, 1 rank, with fsync": ("saving it, one rank, fsync", ours, "raw writes and fsync"),
            "save, 4 ranks, no fsync": ("without fsync", ours, "raw writes"),
            "save, 1 rank, no fsync": ("one rank, without fsync", ours, "raw writes"),
            "load, 4 ranks, warm page cache": ("loading it, each byte verified", ours, "raw reads"),
            "load, 1 rank, warm page cache": ("loading it, one rank", ours, "raw reads"),
            OTHER_LAYOUT: ("loading it as data × tensor", f"{ours}, onto data × tensor", "as saved"),
            "stall of a save, 4 ranks": ("waiting for an asynchronous save", asynchronous, "memcpy"),
            "gather 1 GiB of 4 ranks, no fsync": ("gathering it to one file", f"{OURS} gather", "cat"),
        },
    )
    on_device = _checkpoints(
        device["rows"],
        {
            "save from the device, no fsync": ("saving 2 GiB", ours, "copying and raw writes"),
            "load to the device, warm page cache": ("loading it, each byte verified", ours, "raw reads and copying"),
            "stall of a save": ("waiting for an asynchronous save", asynchronous, "copying to pinned memory"),
        },
    )
    busy = _speeds(device["rows"], "a step that keeps the device busy")
    device_steps = [
        Comparison("a training step", way, busy["hybrid_shard"] / busy[way]) for way in busy if way != "hybrid_shard"
    ]
    return {
        f"CPU processes on 2 cores, gloo; {training['date']}": steps,
        f"CPU processes on 2 cores, local disk; {saving['date']}": list(on_disk),
        f"one {device['device'].split()[1]}; {device['date']}": [*device_steps, *on_device],
    }


def table() -> str:
    lines = ["| | against | speed |", "|---|---|---|"]
    for machine, group in comparisons().items():
        lines += [f"| **{machine}** | | |", *map(_row, group)]
    return "\n".join(lines) + "\n"


def headlines() -> str:
    on_cpu = [one for machine, group in comparisons().items() if machine.startswith("CPU") for one in group]
    found = {(one.what, one.against): one for one in on_cpu}
    return "\n".join(["| | against | speed |", "|---|---|---|", *(_row(found[key]) for key in HEADLINES)]) + "\n"


def renewed(page: Path, table: str) -> str:
    """The page with a table between its marks."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table + END + after


def _row(one: Comparison) -> str:
    return f"| {one.what} | {one.against} | {one.speed:.2f}× |"


def draw(path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    groups = comparisons()
    counts = [len(group) for group in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(9, 0.27 * sum(counts) + 0.5 * len(groups)), height_ratios=counts, layout="constrained"
    )
    largest = max(one.speed for group in groups.values() for one in group)
    for place, (machine, group) in zip(axes, groups.items()):
        shown = list(reversed(group))
        colors = ["#d9480f" if one.speed >= 1 else "#868e96" for one in shown]
        names = [f"{one.what}  /  {one.against}" for one in shown]
        place.barh(names, [one.speed - 1 for one in shown], left=1, color=colors)
        for row, one in enumerate(shown):
            place.text(max(one.speed, 1) * 1.05, row, f"{one.speed:.2f}×", va="center", fontsize=8)
        place.axvline(1, color="#212529", linewidth=1)
        place.set_xscale("log")
        place.set_xlim(0.4, largest * 1.5)
        place.set_title(machine, loc="left", fontsize=9, fontweight="bold")
        place.set_xticks([])
        place.minorticks_off()
        place.tick_params(axis="y", length=0, labelsize=8)
        for side in place.spines.values():
            side.set_visible(False)
    figure.suptitle("lightning_shard as a multiple of  /  …: right of the line it is faster", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    README.write_text(renewed(README, headlines()))
    PAGE.write_text(renewed(PAGE, table()))
    draw(PICTURE)
