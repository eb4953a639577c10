"""What does the strategy cost a training step, in time and memory? The same by hand in plain torch, side by side.

On CPU processes, or on CUDA devices: fully sharded data (FSDP2, a unit per block), tensor, expert and pipeline
parallel, and two axes together; data and tensor also under Lightning's own ModelParallelStrategy; each schedule against
torch's own of that name, over the same stages; activation checkpointing, offload and compile against torch's own means.

*Time.* A row's ways take turns in the same processes, one step of each after the other, so that whatever else the
machine does hits neighbouring steps alike; each round sets all up anew, and its first steps are left out. The figure is
the median of all steps, each of its slowest rank; what ours is beside another is the median of the ratios of
neighbouring steps.

*Peak.* The most bytes of a rank's tensors in a step, by the events of the CPU's allocator in a run of its own
(``benchmarks/lib/steps.py``), or by the CUDA allocator's count, of the rank with most. Offloaded to the CPU from the
CPU nothing is saved: that row is what it costs.

*One device for all ranks* (tests/on_gpu.py) computes what they launch in turn, so a pipeline's stages don't overlap:
such a run shows what the host does for a step, and what a rank's tensors take.

Before any is measured, all ways' losses of some steps are compared: they train alike.

    python benchmarks/training.py                 # half an hour; results/training-<date>.json and .png
    python benchmarks/training.py --only dp2 "pp2, GPipe" --renew
    python benchmarks/training.py --device cuda --width 1536 --context 1024    # results/training-cuda-1536-<date>.json
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lib import by_hand
from benchmarks.lib.report import MIB, RESULTS, Row, Target, result_path, show, write_result
from benchmarks.lib.step_picture import draw
from benchmarks.lib.steps import Size, Watch, Way, peak_of
from benchmarks.lib.turns import Taken, by_turns
from benchmarks.lib.with_lightning import OUR_EXPERT_PLAN, OUR_PLAN, lightnings, ours
from lightning_shard.testing import run_ranks

BY_HAND, LIGHTNING, OURS = "plain torch, by hand", "Lightning's ModelParallelStrategy", "hybrid_shard"
SCHEDULES = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "activation_checkpointing": ({"recomputes": True}, {"activation_checkpointing": True}),
    "cpu_offload": ({"offloads": True}, {"cpu_offload": True}),
    "compile_blocks": ({"compiles": True}, {"compile_blocks": True}),
}
"""By name, what torch's own means are asked, and ours."""
AT_MOST = {BY_HAND: 1.03, LIGHTNING: 1.0}
"""Times the step of these; of torch's schedules, 1.0."""


@dataclass(frozen=True)
class Extent:
    """How long it is measured.

    Attributes:
        warmup: Steps of each round that don't count.
    """

    rounds: int = 2
    steps: int = 20
    warmup: int = 3
    width: int = Size.width
    context: int = Size.context
    device: str = "cpu"

    def size(self, layers: int = 6, **more: Any) -> Size:
        return Size(self.width, layers, self.context, device=self.device, **more)


Ways = dict[str, Way]
RUNS = {"dp2": 2, "tp2": 2, "pp2": 2, "ep2": 2, "pp4": 4, "pp2 x dp2": 4, "dp2 x tp2": 4}
"""Ranks of each run, all of whose rows are measured in turn in the same processes."""


def rows_of(run: str, extent: Extent) -> dict[str, Ways]:
    """The ways to train, by row."""
    size, eight = extent.size(), extent.size(layers=8)  # which four stages divide
    split = {"tensor_parallel_size": 2, "tensor_parallel_plan": OUR_PLAN}
    cut = {"pipeline_parallel_size": 2, "microbatches": size.microbatches}

    def hand(function: Any, of: Size, **settings: Any) -> Way:
        return partial(function, size=of, **settings)

    if run == "dp2":
        bare = {BY_HAND: hand(by_hand.data, size), LIGHTNING: lightnings(size, 2, 1), OURS: ours(size, 2, 2)}
        return {run: bare} | {
            f"{run}, {name}": {BY_HAND: hand(by_hand.data, size, **theirs), OURS: ours(size, 2, 2, **own)}
            for name, (theirs, own) in SETTINGS.items()
        }
    if run == "pp2":
        wide = replace(eight, width=2 * eight.width)  # nearly four times the work, in the same number of calls
        plain = {
            name: {BY_HAND: hand(by_hand.pipeline, of), OURS: ours(of, **cut)}
            for name, of in ((run, eight), (f"{run} twice as wide", wide))
        }
        return plain | {
            f"{run}, {name}": {
                BY_HAND: hand(by_hand.pipeline, eight, schedule=name),
                OURS: ours(eight, **cut, schedule=name, placement="even"),
            }
            for name in SCHEDULES
        }
    mixtures = extent.size(layers=4, has_experts=True)
    experts = {"expert_parallel_size": 2, "expert_parallel_plan": OUR_EXPERT_PLAN}
    ways: dict[str, Ways] = {
        "tp2": {
            BY_HAND: hand(by_hand.tensor, size),
            LIGHTNING: lightnings(size, 1, 2),
            OURS: ours(size, **split),
        },
        "ep2": {BY_HAND: hand(by_hand.experts, mixtures), OURS: ours(mixtures, 2, 2, **experts)},
        "pp4": {
            BY_HAND: hand(by_hand.pipeline, eight, ranks=4),
            OURS: ours(eight, 4, **cut | {"pipeline_parallel_size": 4}),
        },
        "pp2 x dp2": {BY_HAND: hand(by_hand.pipeline, size, data_ranks=2), OURS: ours(size, 4, 2, **cut)},
        "dp2 x tp2": {
            BY_HAND: hand(by_hand.tensor, size, data_ranks=2),
            LIGHTNING: lightnings(size, 2, 2),
            OURS: ours(size, 4, 2, **split),
        },
    }
    return {run: ways[run]}


def is_chosen(row: str, only: Sequence[str] | None) -> bool:
    return only is None or any(row == name or row.startswith(f"{name},") for name in only)


# -- on each rank -----------------------------------------------------------------------------------------------------

Name = tuple[str, str]
"""A row's, and the way's."""


@dataclass
class Measured:
    """One way, on one rank.

    Attributes:
        losses: Of its first steps, where this rank has them.
        rounds: What its steps took.
        peak: Bytes.
    """

    losses: list[float]
    rounds: list[Taken]
    peak: int = 0


def rank_main(run: str, extent: Extent, only: Sequence[str] | None) -> dict[Name, Measured]:
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")  # changes nothing on CPUs
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed.pipelining", "torch._dynamo"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = {row: ways for row, ways in rows_of(run, extent).items() if is_chosen(row, only)}
    ways = {(row, name): way for row, named in rows.items() for name, way in named.items()}
    ways = dict(sorted(ways.items(), key=lambda item: item[0][1] != OURS))  # the first makes the process group
    measured = {}
    for name, way in ways.items():
        watch = Watch(extent.warmup + 1)
        way(watch)
        measured[name] = Measured(watch.losses, [])
    for row in rows:
        for _ in range(extent.rounds):
            gc.collect()  # what an earlier one has left
            of_row = {name: way for name, way in ways.items() if name[0] == row}
            for name, taken in by_turns(of_row, extent.steps, extent.warmup).items():
                measured[name].rounds.append(taken)
    for name, way in ways.items():
        gc.collect()
        measured[name].peak = peak_of(way, extent.device)
    return measured


# -- of all ranks -----------------------------------------------------------------------------------------------------


def check_alike(per_rank: Sequence[Mapping[Name, Measured]]) -> None:
    """All ways of a row have the same losses, as far as the order of sums allows.

    Raises:
        AssertionError: They haven't.
    """
    by_row: dict[str, dict[str, list[float]]] = {}
    for row, way in per_rank[0]:
        losses = [rank[row, way].losses for rank in per_rank if rank[row, way].losses]
        by_row.setdefault(row, {})[way] = [statistics.mean(step) for step in zip(*losses, strict=True)]
    for row, ways in by_row.items():
        for way, losses in ways.items():
            expected = torch.tensor(ways[OURS])
            assert torch.allclose(torch.tensor(losses), expected, rtol=1e-4), f"{row}: {way} {losses}, {ways[OURS]}"


def summarized(per_rank: Sequence[Mapping[Name, Measured]]) -> Iterator[Row]:
    """A row of the table for each way; of each the slowest rank, and the one with the highest peak."""
    check_alike(per_rank)
    rounds = {name: _rounds([rank[name].rounds for rank in per_rank]) for name in per_rank[0]}
    steps = {name: [seconds for of_round in found for seconds in of_round] for name, found in rounds.items()}
    medians = {name: statistics.median(seconds) for name, seconds in steps.items()}
    cpu = {name: sum(_cpu(rank[name].rounds) for rank in per_rank) for name in per_rank[0]}
    for row in dict.fromkeys(row for row, _ in per_rank[0]):
        for way in (BY_HAND, LIGHTNING, OURS):
            if (row, way) not in medians:
                continue
            peaks = {name: max(rank[name].peak for rank in per_rank) for name in medians}
            found = Row(row, way, medians[row, way], mib=peaks[row, way] / MIB)
            found.rounds_s = [statistics.median(of_round) for of_round in rounds[row, way]]
            found.is_reference = way == BY_HAND
            if way != OURS:
                found.ours_is = statistics.median(
                    theirs / own for theirs, own in zip(steps[row, way], steps[row, OURS], strict=True)
                )
                found.note = f"ours takes {cpu[row, OURS] / cpu[row, way]:.2f}× its CPU"
                found.target = target_of(row, way)
            bare, _, setting = row.partition(", ")
            if setting in SETTINGS and (bare, way) in medians:
                more = medians[row, way] / medians[bare, way]
                saved = f"without it: {more:.2f}× the time, {(peaks[row, way] - peaks[bare, way]) / MIB:+.1f} MiB"
                found.note = "; ".join(filter(None, (found.note, saved)))
            yield found


def target_of(row: str, way: str) -> Target:
    most = 1.0 if row.startswith("pp") else AT_MOST[way]
    return Target("ours_is", 1 / most, text=f"ours ≤ {most:g}× the time")


def _rounds(per_rank: Sequence[Sequence[Taken]]) -> list[list[float]]:
    """Each round's steps, each of the slowest rank."""
    return [[*map(max, *(taken.seconds for taken in ranks))] for ranks in zip(*per_rank, strict=True)]


def _cpu(rounds: Sequence[Taken]) -> float:
    return statistics.median(seconds for taken in rounds for seconds in taken.cpu_seconds)


def of_ways(rows: Sequence[Row], figure: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.what, {})[row.contender] = getattr(row, figure)
    return found


def renewed(rows: Sequence[Row], result: Path) -> list[Row]:
    """Those of a result, with these in place of older ones and behind the others; all in the order of a whole run."""
    found = {(row.what, row.contender): row for row in rows}
    if result.exists():
        for entry in json.loads(result.read_text())["rows"]:
            own = {key: value for key, value in entry.items() if key not in ("target", "met")}
            row = Row(**own)
            row.target = target_of(row.what, row.contender) if row.contender != OURS else None
            found.setdefault((row.what, row.contender), row)
    order = [row for run in RUNS for row in rows_of(run, Extent())]
    return sorted(
        found.values(), key=lambda row: (order.index(row.what), (BY_HAND, LIGHTNING, OURS).index(row.contender))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="no result is written unless --renew is given")
    parser.add_argument("--renew", action="store_true", help="these rows in today's result, whose others stay")
    parser.add_argument("--rounds", type=int, default=Extent.rounds)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="CUDA devices: one a rank, or one for all"
    )
    parser.add_argument("--width", type=int, default=Extent.width, help="(%(default)s)")
    parser.add_argument("--context", type=int, default=Extent.context, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny; no result is written unless --results is given")
    parser.add_argument("--results", type=Path, help="where the result goes (benchmarks/results)")
    options = parser.parse_args()
    if options.quick:
        extent = Extent(1, 4, 1, 32, 16, options.device)
    else:
        extent = Extent(options.rounds, width=options.width, context=options.context, device=options.device)
    result = "training" if options.device == "cpu" else f"training-{options.device}-{options.width}"
    chosen = [run for run in RUNS if any(is_chosen(row, options.only) for row in rows_of(run, extent))]
    rows: list[Row] = []
    for run in chosen:
        found = run_ranks(rank_main, RUNS[run], run, extent, options.only, elastic=True, timeout_s=1800)
        rows += summarized(found)
        print(f"{run} is measured", flush=True)
    show("a training step", rows)
    results = options.results or (None if options.quick else RESULTS)
    if results is None or (options.only and not options.renew):
        return
    if options.renew:
        rows = renewed(rows, result_path(result, results))
    path = write_result(
        result,
        rows,
        results,
        extent=vars(extent),
        median_s=of_ways(rows, "seconds"),
        peak_mib=of_ways(rows, "mib"),
        ours_over=of_ways([replace(row, ours_is=1 / row.ours_is) for row in rows if row.ours_is], "ours_is"),
    )
    print(path)
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
