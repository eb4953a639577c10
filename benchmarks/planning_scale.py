"""How does the work of planning a checkpoint grow with the ranks? 10¹² parameters, 8 to 16,384 ranks; nothing is saved.

A GPT of 128 layers with AdamW's state on pipeline × data × tensor ranks. What ranks do by themselves is timed on one
rank of a stage in the middle. What the first rank does for all is timed on the accounts of that stage's ranks, and
multiplied by the stages: these hold different tensors, and as many. Seconds are of CPU, which a busy machine changes
little. How long bytes take between ranks depends on the network: their number is told.

    python benchmarks/planning_scale.py            # results/planning_scale-<date>.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.report import RESULTS, Row, Target, show, write_result
from benchmarks.planning import ATTEMPT, Layout, account_of, boxes_of, pieces_of, reads_of, stage_parameters
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.loading.ranges import plan_reads
from lightning_shard.checkpoint.saving.merge import Account, Merged

LAYERS, WIDTH = 128, 25_600
SIZES = [(2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 16, 8), (16, 32, 8), (16, 64, 8), (16, 128, 8)]
"""Pipeline, data, tensor."""
PLAN_SAVE, PLAN_LOAD = "plan a save, each rank", "plan a load, each rank"
READ, MERGE, WRITE = "read all accounts, first rank", "merge them, first rank", "the manifest to bytes, first rank"
PARSE = "parse the manifest, each rank"
OF_STAGE = {READ, MERGE, WRITE, PARSE}
"""What is timed on one stage of several."""
LIMIT = Target("seconds", 2, most=True)


def main() -> None:
    options = _options()
    rows: list[Row] = []
    sizes = []
    for layout in itertools.starmap(Layout, SIZES):
        if layout.ranks > options.most_ranks:
            continue
        seconds, facts = measure(layout, options.layers, options.width, 3 if layout.ranks <= 512 else 1)
        sizes.append({"ranks": layout.ranks, "layout": str(layout), **facts})
        for what, times in seconds.items():
            whole = [one * (layout.pipeline if what in OF_STAGE else 1) for one in times]
            row = Row(what, f"{layout.ranks:,} ranks", statistics.median(whole), target=LIMIT, rounds_s=whole)
            row.note = f"{layout.pipeline} × one stage's" if what in OF_STAGE else ""
            rows.append(row)
        print(
            json.dumps(sizes[-1]), {row.what: round(row.seconds or 0, 3) for row in rows[-len(seconds) :]}, flush=True
        )
    rows.sort(key=lambda row: list(seconds).index(row.what))
    show(f"{options.layers} layers of width {options.width:,}, seconds of CPU", rows)
    if options.results is not None:
        more = {"layers": options.layers, "width": options.width, "sizes": sizes}
        path = write_result("planning_scale", rows, options.results, **more)
        print(path)
        if options.picture is not None:
            draw(json.loads(path.read_text()), options.picture)


def measure(layout: Layout, layers: int, width: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds by task, of one stage; bytes and counts, of all."""
    seconds: dict[str, list[float]] = {}

    def timed(what: str, function: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = function()
        seconds.setdefault(what, []).append(time.process_time() - start)
        return result

    stage = layout.pipeline // 2
    parameters = stage_parameters(layout, stage, layers, width)
    mesh_ranks = tuple(layout.stage_ranks(stage).flatten().tolist())

    def account(data: int, tensor: int) -> Account:
        rank = mesh_ranks[data * layout.tensor + tensor]
        return account_of(pieces_of(parameters, layout, stage, data, tensor), rank, mesh_ranks)

    for _ in range(rounds):
        boxes_of.cache_clear()
        timed(PLAN_SAVE, lambda: account(layout.data // 2, layout.tensor // 2))
    places = itertools.product(range(layout.data), range(layout.tensor))
    sent = [pickle.dumps(account(data, tensor)) for data, tensor in places]  # as gather_object sends them
    for _ in range(rounds):
        received = timed(READ, lambda: [pickle.loads(data) for data in sent])
        merged = timed(MERGE, partial(Merged, received))
        data = timed(WRITE, partial(_to_bytes, merged))
        del received, merged
    other = Layout(1, layout.data * 2, layout.tensor // 2)
    for _ in range(rounds):
        manifest = timed(PARSE, lambda: Manifest.from_bytes(data))
        reads = reads_of(manifest, parameters, other, 0, 0)
        timed(PLAN_LOAD, lambda: plan_reads(manifest, reads, verify=True))  # noqa: B023
    facts = {
        "account_bytes": max(map(len, sent)),
        "accounts_bytes": layout.pipeline * sum(map(len, sent)),
        "manifest_bytes": layout.pipeline * len(data),
        "files": layout.pipeline * len(manifest.files),
        "tensors": layout.pipeline * (len(manifest.model) + len(manifest.optimizer)),
    }
    return seconds, facts


def _to_bytes(merged: Merged) -> bytes:
    return merged.manifest(attempt=ATTEMPT, layout=None, writer="planning", digests=True).to_bytes()


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds and bytes over ranks, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    tasks: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        ranks = int(row["contender"].split()[0].replace(",", ""))
        tasks.setdefault(row["what"], []).append((ranks, row["seconds"]))
    for what, points in tasks.items():
        left.plot(*zip(*sorted(points)), marker="o", markersize=4, label=what)
    left.axhline(2, color="#495057", linestyle=":", linewidth=1)
    left.set_ylabel("seconds of CPU")
    for key, label in (
        ("account_bytes", "an account"),
        ("accounts_bytes", "all accounts"),
        ("manifest_bytes", "manifest"),
    ):
        points = [(size["ranks"], size[key]) for size in result["sizes"]]
        right.plot(*zip(*points), marker="o", markersize=4, label=label)
    right.set_ylabel("bytes")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([size["ranks"] for size in result["sizes"]])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("ranks")
        axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.3)
    figure.suptitle(f"Planning a checkpoint of 10¹² parameters, {result['date']}; dotted: 2 s", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--most-ranks", type=int, default=16_384)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    parser.add_argument("--picture", type=Path, help="a PNG of the curves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
