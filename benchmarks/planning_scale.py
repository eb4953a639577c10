"""How does the work of planning a checkpoint grow with the ranks? 10¹² parameters, 8 to 16,384 ranks; nothing is saved.

A GPT of 128 layers with AdamW's state on pipeline × data × tensor ranks, each of which also saves the states of its
random generators. Stages are alike, so one is planned, on all its ranks, and counts for all. Embeddings aren't counted.
Seconds are of CPU, which a busy machine changes less. How long bytes take between ranks depends on the network: their
number is told. The table is read by blocks, as ranks read a large one.

    python benchmarks/planning_scale.py            # results/planning_scale-<date>.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.planned_states import ATTEMPT, Layout, account_of, boxes_of, gpt, pieces_of, reads_of, sections
from benchmarks.lib.report import RESULTS, Row, Target, show, write_result
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.format.table import Table
from lightning_shard.checkpoint.loading.load import all_asked
from lightning_shard.checkpoint.loading.ranges import plan_reads
from lightning_shard.checkpoint.ranks import GROUP_RANKS
from lightning_shard.checkpoint.saving.accounts import Account, joined
from lightning_shard.checkpoint.saving.files import Piece
from lightning_shard.checkpoint.saving.merge import Merged

LAYERS, WIDTH = 128, 25_600
SIZES = [(2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 32, 8), (16, 64, 8), (16, 128, 8)]
"""Pipeline, data, tensor."""
PLAN_SAVE, PLAN_LOAD = "plan a save, each rank", "plan a load, each rank"
JOIN = f"read and join {GROUP_RANKS} accounts, leaders"
MERGE, WRITE = "read and merge what they joined, first rank", "the manifest and the table to bytes, first rank"
ASK = "join the names that ranks ask for, first rank"
PARSE, VERIFY = "parse the manifest, each rank", "check all chunks (verify), one process"
ACCOUNT = "account_bytes"
GENERATORS = {
    **{"torch": torch.uint8, "cuda": torch.uint8, "python": torch.int64, "numpy": torch.int64},
    **{"python.gauss": torch.float64, "numpy.gauss": torch.float64},
}
"""What the strategy saves of each rank's random generators."""
LIMIT = Target("seconds", 5, most=True)


def main() -> None:
    options = _options()
    rows: list[Row] = []
    sizes = []
    for layout in itertools.starmap(Layout, SIZES):
        if layout.ranks > options.most_ranks:
            continue
        seconds, facts = whole(layout, options.layers, options.width, options.rounds)
        sizes.append({"ranks": layout.ranks, "layout": str(layout), **facts})
        rows += [Row(what, f"{layout.ranks:,} ranks", value, target=LIMIT) for what, value in seconds.items()]
        print(json.dumps(sizes[-1]), {what: round(value, 3) for what, value in seconds.items()}, flush=True)
    rows.sort(key=lambda row: list(seconds).index(row.what))
    show(f"{options.layers} layers of width {options.width:,}, seconds of CPU", rows)
    if options.results is not None:
        more = {"layers": options.layers, "width": options.width, "sizes": sizes}
        path = write_result("planning_scale", rows, options.results, **more)
        print(path)
        if options.picture is not None:
            draw(json.loads(path.read_text()), options.picture)


def whole(layout: Layout, layers: int, width: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds by task; bytes and counts. Of all stages, from those of one."""
    seconds, facts = measure(layout, layers // layout.pipeline, width, rounds)
    seconds[JOIN] *= min(layout.pipeline, -(-GROUP_RANKS // (layout.data * layout.tensor)))
    for what in (MERGE, WRITE, ASK, PARSE, VERIFY):
        seconds[what] *= layout.pipeline
    return seconds, {what: value * (1 if what == ACCOUNT else layout.pipeline) for what, value in facts.items()}


def measure(layout: Layout, layers: int, width: int, rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """Of a stage of so many layers. Seconds are the least of some rounds: what others do on the machine only adds."""
    stage = layout.pipeline // 2
    parameters = gpt(range(layers), width)
    mesh_ranks = tuple(layout.stage_ranks(stage).flatten().tolist())

    def account(data: int, tensor: int) -> Account:
        rank = mesh_ranks[data * layout.tensor + tensor]
        pieces = pieces_of(parameters, layout, stage, data, tensor)
        return account_of(pieces | {"rank": _generators()}, rank, mesh_ranks)

    places = itertools.product(range(layout.data), range(layout.tensor))
    sent = [pickle.dumps(account(data, tensor)) for data, tensor in places]  # as it goes to the leaders
    tried = []
    for _ in range(rounds):
        seconds: dict[str, float] = {}

        def timed(what: str, function: Callable[[], Any], seconds: dict[str, float] = seconds) -> Any:
            start = time.process_time()
            result = function()
            seconds[what] = seconds.get(what, 0) + time.process_time() - start
            return result

        boxes_of.cache_clear()
        timed(PLAN_SAVE, lambda: account(layout.data // 2, layout.tensor // 2))
        sent_on = []
        for start in range(0, len(sent), GROUP_RANKS):
            part = timed(JOIN, partial(_join, sent[start : start + GROUP_RANKS]))
            sent_on.append(pickle.dumps(part))
        seconds[JOIN] /= len(sent_on)
        merged = timed(MERGE, partial(_merge, sent_on))
        data, table = timed(WRITE, partial(_to_bytes, merged))
        del part, merged
        asked = pickle.dumps({name for section in sections(parameters).values() for name in section})
        timed(ASK, partial(_ask, asked, -(-layout.data * layout.tensor // GROUP_RANKS)))
        manifest = timed(PARSE, partial(_parsed, data, table))
        reads = list(reads_of(manifest, parameters, Layout(1, layout.data * 2, layout.tensor // 2), 0, 0))
        timed(PLAN_LOAD, partial(plan_reads, manifest, reads, verify=True))
        chunks = _parsed(data, table).chunks
        timed(VERIFY, partial(chunks.faults, range(len(chunks.entries))))
        tried.append(seconds)
    tensors = [entry for section in (manifest.model, manifest.optimizer) for entry in section.values()]
    facts = {
        ACCOUNT: max(map(len, sent)),
        "accounts_bytes": sum(map(len, sent)),
        "joined_bytes": sum(map(len, sent_on)),
        "manifest_bytes": len(data),
        "table_bytes": len(table),
        "files": len(manifest.files),
        "tensors": len(tensors),
        "chunks": sum(entry.chunk_count for entry in tensors),
    }
    return {what: min(seconds[what] for seconds in tried) for what in tried[0]}, facts


def _join(sent: Sequence[bytes]) -> Account:
    return joined([pickle.loads(data) for data in sent])


def _merge(sent: Sequence[bytes]) -> Merged:
    return Merged([pickle.loads(data) for data in sent])


def _to_bytes(merged: Merged) -> tuple[bytes, bytes]:
    manifest = merged.manifest(attempt=ATTEMPT, layout=None, digests=True)
    return manifest.to_bytes(), bytes(manifest.chunks.table.data)


def _ask(asked: bytes, groups: int) -> set[str]:
    """By the leaders of a stage: what their ranks ask for, which is the same."""
    return all_asked([pickle.loads(asked) for _ in range(groups)])


def _generators() -> list[tuple[Piece, torch.Tensor]]:
    sizes = {torch.uint8: (5056,), torch.int64: (627,), torch.float64: ()}
    return [
        (
            Piece(name, dtype, sizes[dtype], Box.whole(sizes[dtype])),
            torch.empty(sizes[dtype], dtype=dtype, device="meta"),
        )
        for name, dtype in GENERATORS.items()
    ]


def _parsed(data: bytes, table: bytes) -> Manifest:
    manifest = Manifest.from_bytes(data)
    return manifest.take_table(Table(manifest.table, manifest.table.path, lambda: table))


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds and bytes over ranks, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    tasks: dict[str, list[tuple[int, float]]] = {}
    for row in result["rows"]:
        ranks = int(row["contender"].split()[0].replace(",", ""))
        tasks.setdefault(row["what"], []).append((ranks, row["seconds"]))
    for what, points in tasks.items():
        left.plot(*zip(*sorted(points)), marker="o", markersize=4, label=what)
    left.axhline(5, color="#495057", linestyle=":", linewidth=1)
    left.set_ylabel("seconds of CPU")
    for key, label in (
        ("account_bytes", "an account"),
        ("accounts_bytes", "all accounts"),
        ("joined_bytes", "what leaders joined"),
        ("manifest_bytes", "manifest"),
        ("table_bytes", "table of chunks"),
    ):
        points = [(size["ranks"], size[key]) for size in result["sizes"]]
        right.plot(*zip(*points), marker="o", markersize=4, label=label)
    right.set_ylabel("bytes")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([size["ranks"] for size in result["sizes"]])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("ranks")
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
        axes.grid(alpha=0.3)
    figure.suptitle(f"Planning a checkpoint of 10¹² parameters, {result['date']}; dotted: 5 s", fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--most-ranks", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small, to try; no result unless --results is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    parser.add_argument("--picture", type=Path, help="a PNG of the curves")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(layers=4, width=512, most_ranks=8, rounds=1, results=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
