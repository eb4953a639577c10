"""What does the strategy cost a training step, in time and memory? The same by hand in plain torch, side by side.

On CPU processes: fully sharded data (FSDP2, a unit per block), tensor, expert and pipeline parallel, and two axes
together; data and tensor also under Lightning's own ModelParallelStrategy; each schedule against torch's own of that
name, over the same stages; activation checkpointing, offload and compile against torch's own means.

*Time.* Rounds of the ways are interleaved in the same processes, each round beginning with another one, so that
whatever else the machine does hits all alike; each round's first steps are left out. The figure is the median of all
steps, of the slowest rank.

*Peak.* The most bytes of a rank's tensors in a step, by the events of the CPU's allocator in a run of its own
(``benchmarks/lib/steps.py``), of the rank with most. Offloaded to the CPU from the CPU nothing is saved: that
row is what it costs.

Before any is measured, all ways' losses of some steps are compared: they train alike.

    python benchmarks/training.py                 # a quarter of an hour; results/training-<date>.json and .png
    python benchmarks/training.py --only dp2 "pp2, GPipe"
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lib import by_hand
from benchmarks.lib.report import MIB, RESULTS, Row, Target, show, write_result
from benchmarks.lib.step_picture import draw
from benchmarks.lib.steps import Clock, Size, Watch, Way, peak_of
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

    rounds: int = 3
    steps: int = 9
    warmup: int = 2
    is_quick: bool = False

    def size(self, layers: int = 6, **more: Any) -> Size:
        return Size(32, layers, 16, **more) if self.is_quick else Size(layers=layers, **more)


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
        return {run: {BY_HAND: hand(by_hand.pipeline, eight), OURS: ours(eight, **cut)}} | {
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
        seconds: Of its steps, by round.
        peak: Bytes.
    """

    losses: list[float]
    seconds: list[list[float]]
    peak: int = 0


def rank_main(run: str, extent: Extent, only: Sequence[str] | None) -> dict[Name, Measured]:
    warnings.filterwarnings("ignore")
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
    names = [*ways]
    for number in range(extent.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            gc.collect()  # what an earlier one has left
            clock = Clock(extent.steps, warmup=extent.warmup)
            ways[name](clock)
            measured[name].seconds.append(clock.seconds)
    for name, way in ways.items():
        gc.collect()
        measured[name].peak = peak_of(way)
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
    medians = {name: max(_median(rank[name].seconds) for rank in per_rank) for name in per_rank[0]}
    for row in dict.fromkeys(row for row, _ in per_rank[0]):
        for way in (BY_HAND, LIGHTNING, OURS):
            if (row, way) not in medians:
                continue
            ranks = [rank[row, way] for rank in per_rank]
            found = Row(row, way, medians[row, way], mib=max(rank.peak for rank in ranks) / MIB)
            rounds = zip(*(rank.seconds for rank in ranks))
            found.rounds_s = [max(statistics.median(steps) for steps in of_round) for of_round in rounds]
            found.is_reference = way == BY_HAND
            if way != OURS:
                found.ours_is = medians[row, way] / medians[row, OURS]
                most = 1.0 if row.startswith("pp") else AT_MOST[way]
                found.target = Target("ours_is", 1 / most, text=f"ours ≤ {most:g}× the time")
            bare, _, setting = row.partition(", ")
            if setting in SETTINGS and (bare, way) in medians:
                peaks = [max(rank[name, way].peak for rank in per_rank) for name in (row, bare)]
                found.note = (
                    f"without it: {medians[row, way] / medians[bare, way]:.2f}× the time,"
                    f" {(peaks[0] - peaks[1]) / MIB:+.1f} MiB"
                )
            yield found


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(step for of_round in rounds for step in of_round)


def of_ways(rows: Sequence[Row], figure: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row.what, {})[row.contender] = getattr(row, figure)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="no result is written unless --results is given")
    parser.add_argument("--rounds", type=int, default=Extent.rounds)
    parser.add_argument("--quick", action="store_true", help="tiny; no result is written unless --results is given")
    parser.add_argument("--results", type=Path, help="where the result goes (benchmarks/results)")
    options = parser.parse_args()
    extent = Extent(1, 4, 1, is_quick=True) if options.quick else Extent(options.rounds)
    chosen = [run for run in RUNS if any(is_chosen(row, options.only) for row in rows_of(run, extent))]
    rows: list[Row] = []
    for run in chosen:
        found = run_ranks(rank_main, RUNS[run], run, extent, options.only, elastic=True, timeout_s=1800)
        rows += summarized(found)
        print(f"{run} is measured", flush=True)
    show("a training step", rows)
    results = options.results or (None if options.only or options.quick else RESULTS)
    if results is None:
        return
    medians = of_ways(rows, "seconds")
    path = write_result(
        "training",
        rows,
        results,
        rounds=extent.rounds,
        steps_per_round=extent.steps - extent.warmup - 1,
        median_s=medians,
        peak_mib=of_ways(rows, "mib"),
        ours_over={row: {way: ways[OURS] / median for way, median in ways.items()} for row, ways in medians.items()},
    )
    print(path)
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
