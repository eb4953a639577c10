"""What do evaluations cost on pipeline stages, and what do batches that fill the pipeline save?

Two questions, each answered side by side in the same processes, rounds interleaved:

- A tiny validation batch: the CPU time of a rank, next to one plain process. Nearly all of it is overhead.
- Many small batches to predict, streamed over batches and one after the other. The blocks sleep, as a process does that
  waits for its accelerator: so the wall time is that of the pipeline, and other work on the machine matters less.

The figures are the slowest rank's, of the least disturbed round; medians are in the result too.

    python benchmarks/evaluation.py               # writes benchmarks/results/evaluation-<date>.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks

ROUNDS, BATCHES, WARMUP = 5, 40, 8
WIDTH, BLOCKS, MICROBATCHES = 8, 8, 4
SLEEP_S = 0.004
"""Of a block, for each microbatch."""
STREAMED, ONE_BY_ONE, PLAIN = "streamed", "one after the other", "one plain process"


class Sleeps(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.mix(x)


class Module(L.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Sleeps(seconds) for _ in range(BLOCKS)))

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch)


class Clock(L.Callback):
    """Looks at the ends of batches; as a progress bar it isn't in the way of what streams."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def on_validation_batch_end(self, *_: Any) -> None:
        self.cpu_s.append(time.process_time())
        self.wall_s.append(time.perf_counter())

    on_predict_batch_end = on_validation_batch_end


Clock.on_validation_batch_end.__module__ = "lightning.of_this_benchmark"


def per_batch(times: list[float]) -> float:
    return (times[-1] - times[WARMUP]) / (len(times) - 1 - WARMUP)


def run(stages: int, method: str, size: int, seconds: float, *, streams: bool = True) -> tuple[float, float]:
    """Seconds of this rank's CPU, and of the clock on the wall, for each batch."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock()
    strategy: Any = "auto"
    if stages > 1:
        strategy = HybridShardStrategy(pipeline_parallel_size=stages, microbatches=MICROBATCHES)
    in_order = mock.patch("lightning_shard.plugin.strategy.runs_in_order", return_value=True)
    with nullcontext() if streams else in_order:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=stages,
            strategy=strategy,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: Any = DataLoader(torch.randn(BATCHES * size, WIDTH), batch_size=size)  # type: ignore[arg-type]
        if method == "validate":
            trainer.validate(Module(seconds), loader, verbose=False)
        else:
            trainer.predict(Module(seconds), loader)
    return per_batch(clock.cpu_s), per_batch(clock.wall_s)


def rank_main(stages: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By question and way, the seconds of each round."""
    questions: dict[str, tuple[int, dict[str, Callable[[], tuple[float, float]]]]] = {}
    # CPU time of a tiny batch
    ways = {name: (lambda s=name == STREAMED: run(stages, "validate", 8, 0.0, streams=s)) for name in _WAYS}
    questions["validate, CPU of a tiny batch"] = 0, ways
    for size in (1, MICROBATCHES):
        ways = {
            name: (lambda s=name == STREAMED, b=size: run(stages, "predict", b, SLEEP_S, streams=s)) for name in _WAYS
        }
        questions[f"predict, {size} microbatches"] = 1, ways
    seen: dict[str, dict[str, list[float]]] = {question: {name: [] for name in _WAYS} for question in questions}
    for _ in range(rounds):
        for question, (which, contenders) in questions.items():
            for name, contender in contenders.items():
                seen[question][name].append(contender()[which])
    return seen


_WAYS = (ONE_BY_ONE, STREAMED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    table = Table("stages", "what", "way", "each batch")
    plain_s = min(run(1, "validate", 8, 0.0)[0] for _ in range(options.rounds))
    result: dict[str, Any] = {PLAIN: {"validate, CPU of a tiny batch": plain_s}}
    table.add_row("1", "validate, CPU of a tiny batch", PLAIN, f"{plain_s * 1000:.2f} ms")
    for stages in options.stages:
        ranks = run_ranks(rank_main, stages, stages, options.rounds, elastic=True, timeout_s=1500)
        result[f"{stages} stages"] = found = {
            question: {
                name: {
                    "least_s": max(map(min, per_rank)),
                    "median_s": max(map(statistics.median, per_rank)),
                    "each_s": per_rank,
                }
                for name in _WAYS
                for per_rank in [[rank[question][name] for rank in ranks]]
            }
            for question in ranks[0]
        }
        for question, ways in found.items():
            ways["one_by_one_over_streamed"] = ways[ONE_BY_ONE]["least_s"] / ways[STREAMED]["least_s"]
            for name in _WAYS:
                table.add_row(str(stages), question, name, f"{ways[name]['least_s'] * 1000:.2f} ms")
    Console().print(table)
    path = Path(__file__).parent / "results" / f"evaluation-{date.today().isoformat()}.json"
    about = {
        "date": date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/evaluation.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "rounds": options.rounds,
        "blocks": BLOCKS,
        "sleep_of_a_block_s": SLEEP_S,
        "batches_per_round": BATCHES - 1 - WARMUP,
    }
    path.write_text(json.dumps({**about, "seconds_per_batch": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
