"""What does the strategy cost a training step? The same fully sharded step three ways, side by side.

By hand in plain torch, under Lightning's own ModelParallelStrategy, and under ours; 2 data-parallel CPU processes,
FSDP2 with a unit per block. Rounds of the three are interleaved in the same processes, so that whatever else the
machine does hits all alike; each round's first steps are left out. The figure is the ratio of medians over all rounds.

    python benchmarks/step.py        # writes benchmarks/results/step-<date>.json
"""

from __future__ import annotations

import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from recipes.gpt import GPT

RANKS, ROUNDS, STEPS, WARMUP = 2, 7, 14, 4
BATCH, CONTEXT = 8, 128


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return BATCH * RANKS * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))


def network() -> GPT:
    torch.manual_seed(1)
    return GPT(width=256, layers=6, heads=4, context=CONTEXT)


def loss_of(model: GPT, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def shard(model: GPT, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Module(L.LightningModule):
    """The unmodified one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedModule(Module):
    """What Lightning's own strategy asks for."""

    def configure_model(self) -> None:
        shard(self.model, self.device_mesh["data_parallel"])


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def with_lightning(strategy: L.pytorch.strategies.Strategy, module: L.LightningModule) -> list[float]:
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(Tokens(), batch_size=BATCH))
    return clock.ends


def by_hand() -> list[float]:
    model = network()
    shard(model, init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ends = []
    for window in batches():
        loss = loss_of(model, window)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    return ends


def batches() -> Iterator[Tensor]:
    rank = torch.distributed.get_rank()
    order = range(rank, len(Tokens()), RANKS)
    return iter(DataLoader(Tokens(), batch_size=BATCH, sampler=order))


def rank_main() -> dict[str, list[float]]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ways = {
        "plain torch, by hand": by_hand,
        "Lightning's ModelParallelStrategy": lambda: with_lightning(
            ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1), ShardedModule()
        ),
        "hybrid_shard": lambda: with_lightning(HybridShardStrategy(), Module()),
    }
    steps: dict[str, list[float]] = {name: [] for name in ways}
    with_lightning(HybridShardStrategy(), Module())  # makes the process group, and warms up
    for _ in range(ROUNDS):
        for name, run in ways.items():
            ends = run()
            steps[name] += [b - a for a, b in zip(ends[WARMUP:], ends[WARMUP + 1 :])]
    return steps


def main() -> None:
    steps = run_ranks(rank_main, RANKS, elastic=True, timeout_s=900)[0]
    medians = {name: statistics.median(times) for name, times in steps.items()}
    ours = medians["hybrid_shard"]
    table = Table("training step, 2 data-parallel CPU processes", "median", "ours takes")
    for name, median in medians.items():
        table.add_row(name, f"{median * 1000:.1f} ms", f"{ours / median:.3f}×")
    Console().print(table)
    result = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/step.py",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread per rank, torch {torch.__version__}",
        "rounds": ROUNDS,
        "steps_per_round": STEPS - WARMUP - 1,
        "median_s": medians,
        "ours_over": {name: ours / median for name, median in medians.items()},
    }
    path = Path(__file__).parent / "results" / f"step-{result['date']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
