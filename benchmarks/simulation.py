"""Does a pipeline's step take as long as simulated from its own measured costs?

The strategy trains on CPU processes, one for each stage, under each schedule that it runs. Every action is timed, with
what it waits for at a receive apart. The medians of each stage's forward and backward, and the shortest receive, go
into ``lightning_shard.pipeline.simulate``; what it says of a step is put beside the measured step, from the first
action of any rank to the last.

Blocks *sleep*, so that each stage computes as if on a device of its own, however few cores there are; or they
*compute*, on as many stages as there are cores. On a busy machine the second measures whoever else is there.

    python benchmarks/simulation.py                 # writes benchmarks/results/simulation-<date>.json
    python benchmarks/simulation.py --only sleep --steps 3
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
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
from benchmarks.lib.sleeping import Sleeping
from lightning_shard import HybridShardStrategy
from lightning_shard.pipeline.channel import Channel
from lightning_shard.pipeline.orders import SCHEDULES, build
from lightning_shard.pipeline.simulate import Costs, simulate
from lightning_shard.pipeline.step import PipelinedStep
from lightning_shard.testing import run_ranks

STEPS, WARMUP, WIDTH, TARGET = 6, 2, 256, 0.1
WHOLE = ["1F1B", "Eager1F1B", "GPipe", "Interleaved1F1B"]
"""Of the schedules with names, those with whole backwards: the time of a backward's parts isn't set by sleeping."""
SLEEPS_S = {2: (0.08, 0.12), 4: (0.10, 0.06, 0.08, 0.12)}
"""A forward of each block; a backward takes twice that."""


class Block(nn.Module):
    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x if self.seconds is None else Sleeping.apply(x, self.seconds)


class Module(L.LightningModule):
    def __init__(self, blocks: Sequence[float | None]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Stopwatch:
    """When each step of this rank began and ended, and what each of its actions took without waiting."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._waited = 0.0

    def watch(self) -> None:
        """Of all pipelined steps of this process."""
        PipelinedStep.train = self._step(PipelinedStep.train)  # type: ignore[method-assign]
        PipelinedStep._forward = self._action("F", PipelinedStep._forward)  # type: ignore[method-assign]
        PipelinedStep._backward = self._action("B", PipelinedStep._backward)  # type: ignore[method-assign]
        Channel.receive = self._receive(Channel.receive)  # type: ignore[method-assign]
        Channel.receive_gradients = self._receive(Channel.receive_gradients)  # type: ignore[method-assign]

    def _step(self, train: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self.steps.append({"begin": time.monotonic(), "F": [], "B": [], "received": []})
            try:
                return train(*args, **options)
            finally:
                self.steps[-1]["end"] = time.monotonic()

        return timed

    def _action(self, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began, waited = time.monotonic(), self._waited
            try:
                return run(*args, **options)
            finally:
                self.steps[-1][kind].append(time.monotonic() - began - (self._waited - waited))

        return timed

    def _receive(self, receive: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return receive(*args, **options)
            finally:
                taken = time.monotonic() - began
                self._waited += taken
                self.steps[-1]["received"].append(taken)

        return timed


def rank_main(blocks: Sequence[float | None], stages: int, schedule: str, steps: int) -> list[dict[str, Any]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    stopwatch = Stopwatch()
    stopwatch.watch()
    microbatches = 2 * stages
    rows = 256 if blocks[0] is None else 1
    batches = torch.randn((steps + WARMUP) * microbatches * rows, WIDTH)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=HybridShardStrategy(
            pipeline_parallel_size=stages, microbatches=microbatches, schedule=schedule, placement="even"
        ),
        max_steps=steps + WARMUP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(blocks), DataLoader(batches, batch_size=microbatches * rows))
    return stopwatch.steps[WARMUP:]


def measure(kind: str, stages: int, schedule: str, steps: int) -> dict[str, Any]:
    blocks: Sequence[float | None] = SLEEPS_S[stages] if kind == "sleep" else (None,) * (2 * stages)
    # the last stage is on rank 0
    found = run_ranks(rank_main, stages, blocks, stages, schedule, steps, elastic=True, timeout_s=300)[::-1]
    forward, backward = ([statistics.median(_all(stage, way)) for stage in found] for way in "FB")
    receive = min(taken for stage in found for taken in _all(stage, "received"))
    half = [seconds / 2 for seconds in backward]
    costs = Costs(forward, half, half, receive, receives_late=True)
    simulated = simulate(build(schedule, stages, 2 * stages), costs)
    spans = [
        max(stage[step]["end"] for stage in found) - min(stage[step]["begin"] for stage in found)
        for step in range(steps)
    ]
    measured = statistics.median(spans)
    return {
        "blocks": kind,
        "stages": stages,
        "schedule": schedule,
        "microbatches": 2 * stages,
        "forward_s": forward,
        "backward_s": backward,
        "receive_s": receive,
        "measured_s": measured,
        "measured_steps_s": spans,
        "simulated_s": simulated.duration,
        "ratio": measured / simulated.duration,
        "met": abs(measured / simulated.duration - 1) <= TARGET,
    }


def _all(steps: Sequence[dict[str, Any]], what: str) -> list[float]:
    return [seconds for step in steps for seconds in step[what]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("sleep", "compute"), default=["sleep", "compute"])
    parser.add_argument(
        "--schedules", nargs="+", choices=SCHEDULES, default=["1F1B", "Eager1F1B", "GPipe", "Interleaved1F1B"]
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"after {WARMUP} that don't count (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs = partial(measure, steps=options.steps)
    rows = [runs("sleep", n, s) for n in (2, 4) for s in options.schedules if "sleep" in options.only]
    rows += [runs("compute", 2, s) for s in options.schedules if "compute" in options.only]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("blocks", "stages", "schedule", "measured", "simulated", "ratio", ""):
        table.add_column(title)
    for row in rows:
        seconds = [f"{row[name]:.3f} s" for name in ("measured_s", "simulated_s")]
        met = "within 10 %" if row["met"] else "not within 10 %"
        table.add_row(row["blocks"], str(row["stages"]), row["schedule"], *seconds, f"{row['ratio']:.3f}", met)
    Console().print(table)
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
