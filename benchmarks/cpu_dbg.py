"""What does the strategy cost a training step? The same parallelism by hand in plain torch, side by side.

On CPU processes: fully sharded data (FSDP2, a unit per block), tensor, pipeline (torch's own 1F1B schedule over stages
cut by hand) and pipeline × data; data and tensor also under Lightning's own ModelParallelStrategy. Rounds of the ways
are interleaved in the same processes, so that whatever else the machine does hits all alike; each round's first steps
are left out. The figure is the ratio of medians over all rounds.

    python benchmarks/training.py                 # writes benchmarks/results/training-<date>.json
    python benchmarks/training.py --only dp2 pp2
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from recipes.gpt import GPT

ROUNDS, STEPS, WARMUP = 7, 14, 4
BATCH, CONTEXT, MICROBATCHES = 8, 128, 4
PLAN = {
    "blocks.*.attention.query": "colwise",
    "blocks.*.attention.key": "colwise",
    "blocks.*.attention.value": "colwise",
    "blocks.*.attention.output": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}

Way = Callable[[], list[float]]
"""Runs ``STEPS`` steps; returns when each ended, in seconds."""


class Tokens(Dataset[Tensor]):
    """Windows for as many steps as are measured."""

    def __init__(self, data_ranks: int) -> None:
        self.data_ranks = data_ranks

    def __len__(self) -> int:
        return BATCH * self.data_ranks * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))


def network() -> GPT:
    torch.manual_seed(1)
    return GPT(width=256, layers=6, heads=4, context=CONTEXT)


def loss_of(logits: Tensor, window: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def split(model: GPT, mesh: DeviceMesh) -> None:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    parallelize_module(model, mesh, {name: styles[style]() for name, style in PLAN.items()})


# -- by hand


def train_by_hand(module: nn.Module, step: Callable[[Tensor], None], data_rank: int, data_ranks: int) -> list[float]:
    tokens = Tokens(data_ranks)
    loader = DataLoader(tokens, batch_size=BATCH, sampler=range(data_rank, len(tokens), data_ranks))
    optimizer = optimizer_of(module)
    ends = []
    for window in loader:
        optimizer.zero_grad()
        step(window)
        optimizer.step()
        ends.append(time.process_time())
    return ends


def whole_step(model: GPT, window: Tensor) -> None:
    loss_of(model(window[:, :-1]), window).backward()


def data_by_hand() -> list[float]:
    model = network()
    mesh = init_device_mesh("cpu", (2,))
    shard(model, mesh)
    return train_by_hand(model, partial(whole_step, model), mesh.get_rank(), 2)


def tensor_by_hand() -> list[float]:
    model = network()
    split(model, init_device_mesh("cpu", (2,)))
    return train_by_hand(model, partial(whole_step, model), 0, 1)


class Stage(nn.Module):
    """What a pipeline of torch's own asks of its user: the network, rewritten as parts."""

    def __init__(self, model: GPT, stage: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.blocks = model.blocks[:half] if stage == 0 else model.blocks[half:]
        self.embeddings = nn.ModuleList([model.token_embedding, model.position_embedding] if stage == 0 else [])
        self.ends = nn.ModuleList([model.norm, model.head] if stage == 1 else [])

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings:
            tokens, positions = self.embeddings
            x = tokens(x) + positions(torch.arange(x.size(1)))
        for block in self.blocks:
            x = block(x)
        for end in self.ends:
            x = end(x)
        return x


def pipeline_by_hand(data_ranks: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, data_ranks), mesh_dim_names=("pipeline", "data"))
    number = mesh.get_local_rank("pipeline")
    module = Stage(network(), number)
    if data_ranks > 1:
        shard(module, mesh["data"])
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)

    def step(window: Tensor) -> None:
        if number == 0:
            schedule.step(window[:, :-1])
        else:
            schedule.step(target=window)

    return train_by_hand(module, step, mesh.get_local_rank("data"), data_ranks)


# -- with Lightning


class Module(L.LightningModule):
    """The unmodified one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model(batch[:, :-1]), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class ModuleThatShardsItself(Module):
    """What Lightning's own strategy asks for."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            split(self.model, mesh["tensor_parallel"])
        if mesh["data_parallel"].size() > 1:
            shard(self.model, mesh["data_parallel"])


class Clock(L.Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())


def with_lightning(strategy: Callable[[], Strategy], kind: type[Module], ranks: int, data_ranks: int) -> list[float]:
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(),
        max_steps=STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(kind(), DataLoader(Tokens(data_ranks), batch_size=BATCH))
    return clock.ends


def ours(ranks: int, data_ranks: int, **settings: Any) -> Way:
    strategy = partial(HybridShardStrategy, **settings)
    return lambda: with_lightning(strategy, Module, ranks, data_ranks)


def lightnings(data: int, tensor: int) -> Way:
    strategy = partial(ModelParallelStrategy, data_parallel_size=data, tensor_parallel_size=tensor)
    return lambda: with_lightning(strategy, ModuleThatShardsItself, data * tensor, data)


BY_HAND, LIGHTNING, OURS = "plain torch, by hand", "Lightning's ModelParallelStrategy", "hybrid_shard"


def ways(layout: str) -> tuple[int, dict[str, Way]]:
    """How many ranks, and the ways to train on them."""
    cut = {"pipeline_parallel_size": 2, "microbatches": MICROBATCHES}
    plan = {"model." + name: style for name, style in PLAN.items()}
    return {
        "dp2": (2, {BY_HAND: data_by_hand, LIGHTNING: lightnings(2, 1), OURS: ours(2, 2)}),
        "tp2": (
            2,
            {
                BY_HAND: tensor_by_hand,
                LIGHTNING: lightnings(1, 2),
                OURS: ours(2, 1, tensor_parallel_size=2, tensor_parallel_plan=plan),
            },
        ),
        "pp2": (2, {BY_HAND: partial(pipeline_by_hand, 1), OURS: ours(2, 1, **cut)}),
        "pp2 x dp2": (4, {BY_HAND: partial(pipeline_by_hand, 2), OURS: ours(4, 2, **cut)}),
    }[layout]


LAYOUTS = ("dp2", "tp2", "pp2", "pp2 x dp2")


def rank_main(layout: str, rounds: int) -> dict[str, list[float]]:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    contenders = ways(layout)[1]
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    contenders[OURS]()  # makes the process group, and warms up
    for _ in range(rounds):
        for name, run in contenders.items():
            ends = run()
            steps[name] += [end - start for start, end in pairwise(ends[WARMUP:])]
    return steps


def rows(layouts: list[str], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    for layout in layouts:
        # each rank's own clock: the slowest rank's, since a step ends when all have
        per_rank = run_ranks(rank_main, ways(layout)[0], layout, rounds, elastic=True, timeout_s=900)
        yield layout, {name: max(statistics.median(rank[name]) for rank in per_rank) for name in per_rank[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    table = Table("layout", "way", "median step", "ours takes")
    medians = {}
    for layout, row in rows(options.only, options.rounds):
        medians[layout] = row
        for name, median in row.items():
            table.add_row(layout, name, f"{median * 1000:.1f} ms", f"{row[OURS] / median:.3f}×")
    Console().print(table)
    result = {
        "date": date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/training.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread per rank, torch {torch.__version__}",
        "rounds": options.rounds,
        "steps_per_round": STEPS - WARMUP - 1,
        "median_s": medians,
        "ours_over": {
            layout: {name: row[OURS] / median for name, median in row.items()} for layout, row in medians.items()
        },
    }
    path = Path(__file__).parent / "results" / f"cpudbg-{result['date']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
