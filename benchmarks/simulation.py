"""Does a pipeline's step take as long as simulated from its own measured costs, and is a smaller bubble a faster step?

The strategy trains on CPU processes, one for each rank, under each schedule that has a name, and ``RecordTimeline``
notes what each action takes, without what it waits for. The medians of each stage's actions, and of sends, go into
``lightning_shard.pipeline.schedules.simulate``; what it says of a step is put beside the measured step, from the first
action of any rank to the last. All schedules of a network run the same blocks, so their steps can be compared too:
1F1B's is the reference.

Blocks *sleep*, so that each rank computes as if on a device of its own, however few cores there are: in their forward,
for the gradient of their input, and on the way to the gradient of their weight, which is where a backward in two parts
has its second part. Of these the step is also simulated by the seconds that were set: what is more than that is the
runtime's own. Or blocks *compute*, on as many ranks as there are cores. On a busy machine these measure whoever else
is there.

*Replayed* is the measured step over one that is simulated from what each single action took in it, so that actions that
another program held up count as what they were.

    python benchmarks/simulation.py                 # minutes; writes benchmarks/results/simulation-<date>.json
    python benchmarks/simulation.py --only even --schedules 1F1B ZBVZeroBubble --steps 3
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lib.report import RESULTS, machine
from benchmarks.lib.sleeping import SleepingLinear
from lightning_shard import HybridShardStrategy
from lightning_shard.dryrun.record import RecordTimeline
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.recorded import measured_costs
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate
from lightning_shard.testing import run_ranks

STEPS, WARMUP, TARGET = 6, 2, 0.1
SLEEPS_S = {
    ("even", 2): (0.06,) * 4,
    ("even", 4): (0.04,) * 8,
    ("uneven", 2): (0.06, 0.04, 0.03, 0.05),
    ("uneven", 4): (0.05, 0.03, 0.04, 0.05, 0.03, 0.04, 0.05, 0.04),
}
"""Of each block: a forward, the gradients of its input, and those of its weight take so long each."""
SLEEPING_WIDTH, WIDTH, ROWS = 16, 256, 1024
"""Of blocks that sleep; of blocks that compute, and the rows of their microbatches."""


class Computing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Module(L.LightningModule):
    def __init__(self, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(width))  # as behind an embedding, what the first block is given trains
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch + self.start).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def rank_main(kind: str, ranks: int, schedules: Sequence[str], steps: int, times: float) -> list[list[Timeline]]:
    """The recorded steps of each schedule, on rank 0."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    return [recorded(kind, ranks, schedule, steps, times) for schedule in schedules]


def recorded(kind: str, ranks: int, schedule: str, steps: int, times: float) -> list[Timeline]:
    microbatches, sleeps = 2 * ranks, kind != "compute"
    rows, width = (1, SLEEPING_WIDTH) if sleeps else (ROWS, WIDTH)
    seconds = [times * each for each in SLEEPS_S.get((kind, ranks), ())]
    blocks = [SleepingLinear(width, s) for s in seconds] if sleeps else [Computing() for _ in range(4)]
    batches = torch.randn((steps + WARMUP) * microbatches * rows, width)
    with tempfile.TemporaryDirectory() as folder:
        record = RecordTimeline(folder, after=WARMUP, steps=steps)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=HybridShardStrategy(
                pipeline_parallel_size=ranks, microbatches=microbatches, schedule=schedule, placement="even"
            ),
            max_steps=steps + WARMUP,
            callbacks=[record],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(blocks, width), DataLoader(batches, batch_size=microbatches * rows))
    return [step.timeline for step in record.recording.steps] if record.recording is not None else []


def row_of(kind: str, ranks: int, schedule: str, timelines: Sequence[Timeline], times: float) -> dict[str, Any]:
    order = build(schedule, ranks, 2 * ranks)
    assert all(timeline.schedule.rows == order.rows for timeline in timelines), "the order that ran is another one"
    costs = measured_costs(timelines)
    simulated = simulate(order, costs)
    measured = statistics.median(timeline.duration for timeline in timelines)
    as_set = None if kind == "compute" else simulate(order, _as_set(kind, ranks, order, times))
    return {
        "blocks": kind,
        "ranks": ranks,
        "stages": order.stages,
        "schedule": schedule,
        "microbatches": order.microbatches,
        "forward_s": costs.forward,
        "backward_input_s": costs.backward_input,
        "backward_weight_s": costs.backward_weight,
        "transfer_s": costs.slowest_transfer,
        "measured_s": measured,
        "measured_steps_s": [timeline.duration for timeline in timelines],
        "simulated_s": simulated.duration,
        "ratio": measured / simulated.duration,
        "met": abs(measured / simulated.duration - 1) <= TARGET,
        "replayed": statistics.median(timeline.duration / _replayed(timeline).duration for timeline in timelines),
        "idle": statistics.median(timeline.bubble for timeline in timelines),
        "idle_simulated": simulated.bubble,
        "as_set_s": None if as_set is None else as_set.duration,
    }


def _replayed(timeline: Timeline) -> Timeline:
    """A step simulated from what each of its actions took, not from medians: what is more was spent between them."""
    nothing = [0.0] * timeline.schedule.stages
    taken = {event.action: event.end - event.start for event in timeline.events}
    return simulate(timeline.schedule, Costs(nothing, nothing, nothing, once=taken))


def _as_set(kind: str, ranks: int, order: Schedule, times: float) -> Costs:
    """The costs of stages by the seconds that their blocks sleep; as many blocks on each."""
    seconds = [times * each for each in SLEEPS_S[kind, ranks]]
    each = len(seconds) // order.stages
    return Costs.of_forwards([sum(seconds[s * each : (s + 1) * each]) for s in range(order.stages)])


def rows_of(only: Sequence[str], schedules: Sequence[str], steps: int, times: float) -> Iterator[dict[str, Any]]:
    for kind in only:
        for ranks in (2, 4) if kind != "compute" else (2,):
            reference = None
            found = run_ranks(rank_main, ranks, kind, ranks, schedules, steps, times, elastic=True, timeout_s=900)[0]
            for schedule, timelines in zip(schedules, found, strict=True):
                row = row_of(kind, ranks, schedule, timelines, times)
                reference = row["measured_s"] if schedule == "1F1B" else reference
                row["of_1f1b"] = None if reference is None else row["measured_s"] / reference
                print(f"{kind} {ranks} {schedule}: {row['measured_s']:.3f} s, {row['ratio']:.3f}", flush=True)
                yield row


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    titles = (
        "blocks",
        "ranks",
        "schedule",
        "measured",
        "simulated",
        "ratio",
        "",
        "replayed",
        "as set",
        "of 1F1B's",
        "idle",
    )
    for title in titles:
        table.add_column(title)
    for row in rows:
        table.add_row(
            row["blocks"],
            str(row["ranks"]),
            row["schedule"],
            *(f"{row[name]:.3f} s" for name in ("measured_s", "simulated_s")),
            f"{row['ratio']:.3f}",
            "within 10 %" if row["met"] else "not within 10 %",
            f"{row['replayed']:.3f}",
            "" if row["as_set_s"] is None else f"{row['as_set_s']:.3f} s",
            "" if row["of_1f1b"] is None else f"{row['of_1f1b']:.3f}",
            f"{100 * row['idle']:.1f} %, {100 * row['idle_simulated']:.1f} % simulated",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ("even", "uneven", "compute")
    parser.add_argument("--only", nargs="+", choices=kinds, default=[*kinds], help="even and uneven ones sleep")
    names = ["1F1B", *(name for name in SCHEDULES if name != "1F1B")]  # the reference first
    parser.add_argument("--schedules", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"after {WARMUP} that don't count (%(default)s)")
    parser.add_argument(
        "--times", type=float, default=1.0, help="blocks sleep so many times as long: on a busy machine"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [*rows_of(options.only, options.schedules, options.steps, options.times)]
    Console(width=150).print(table_of(rows))
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    result = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/simulation.py", *sys.argv[1:]]),
        "machine": machine(),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "target": "measured step within 10 % of the simulated one",
        "rows": rows,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"simulation-{result['date']}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(path)


if __name__ == "__main__":
    main()
