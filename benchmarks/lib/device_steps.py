"""A training step on one CUDA device: by hand, under Lightning's own strategy, under ours; and what waits for it."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.lib.report import Row, compare
from benchmarks.lib.rounds import Timed, quiet
from lightning_shard import HybridShardStrategy
from recipes.gpt import GPT

BY_HAND = "plain torch, by hand"
LIGHTNING = "Lightning's ModelParallelStrategy"
OURS = "hybrid_shard"


@dataclass(frozen=True)
class Size:
    """What is trained, and for how many steps a round, of which the first aren't counted."""

    name: str
    width: int
    layers: int
    heads: int
    batch: int
    context: int
    steps: int
    warmup: int


SIZES = (
    Size("a step that keeps the device busy", 1536, 8, 12, 16, 1024, steps=12, warmup=4),
    Size("a step of many small launches", 128, 8, 4, 2, 128, steps=50, warmup=10),
)
SMALL = Size("a step to try", 64, 2, 2, 2, 32, steps=6, warmup=2)


@functools.cache
def _network(size: Size) -> GPT:
    torch.manual_seed(1)
    return GPT(width=size.width, layers=size.layers, heads=size.heads, context=size.context)


def network(size: Size) -> GPT:
    return copy.deepcopy(_network(size))


def batches(size: Size) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    windows = torch.randint(0, 256, (size.batch * size.steps, size.context + 1), generator=generator)
    return DataLoader(TensorDataset(windows), batch_size=size.batch, pin_memory=True)


def loss_of(model: GPT, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def shard(model: GPT, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Module(L.LightningModule):
    """The unmodified one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = network(size)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


class ShardedModule(Module):
    """What Lightning's own strategy asks for."""

    def configure_model(self) -> None:
        shard(self.model, self.device_mesh["data_parallel"])


class AskingModule(Module):
    """Waits for the device in each step, as one does that prints its loss: to see that it would be seen."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = float(loss)
        return loss


class Clock(L.Callback):
    """Seconds a step, of those after the warm-up, from an idle device to an idle device."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._ended = 0
        self._begin = 0.0
        self.seconds = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self._ended += 1
        if self._ended == self._size.warmup:
            torch.cuda.synchronize()
            self._begin = time.perf_counter()
        if self._ended == self._size.steps:
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - self._begin) / (self._size.steps - self._size.warmup)


def fit(size: Size, strategy: Any, module: L.LightningModule, *callbacks: L.Callback, **settings: Any) -> None:
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy,
        max_steps=size.steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, batches(size))


def lightnings() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)


def by_hand(size: Size) -> float:
    model = network(size).cuda()
    shard(model, init_device_mesh("cuda", (1,)))
    optimizer, clock = optimizer_of(model), Clock(size)
    for (window,) in batches(size):
        loss = loss_of(model, window.to("cuda", non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.on_train_batch_end()
    return clock.seconds


def _timed_fit(strategy: Callable[[], Any], kind: type[Module], size: Size) -> float:
    clock = Clock(size)
    fit(size, strategy(), kind(size), clock)
    return clock.seconds


WAYS: dict[str, Callable[[Size], float]] = {
    BY_HAND: by_hand,
    LIGHTNING: functools.partial(_timed_fit, lightnings, ShardedModule),
    OURS: functools.partial(_timed_fit, HybridShardStrategy, Module),
}


def measure(sizes: tuple[Size, ...], rounds: int) -> list[Row]:
    """On a rank of its own, of one."""
    quiet()
    torch.set_float32_matmul_precision("high")
    found = []
    for size in sizes:
        _timed_fit(HybridShardStrategy, Module, size)  # makes the process group, and warms up
        timed = Timed({name: [] for name in WAYS}, {})
        for number in range(rounds):
            names = list(WAYS)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                timed.seconds[name].append(WAYS[name](size))
                torch.cuda.empty_cache()
        found += compare(size.name, 0, timed, reference=BY_HAND, ours=OURS)
    for row in found:
        row.gb_per_s = None
    return found


# -- what waits for the device ----------------------------------------------------------------------------------------


class Watch(L.Callback):
    """Where the host waits for the device in steps after the warm-up, and how often a step: by file and line."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self._ended = 0
        self._open = contextlib.ExitStack()
        self._caught: list[Any] = []
        self.waits: dict[str, float] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        self._ended += 1
        if self._ended == self._size.warmup:
            self._caught = self._open.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            self._open.callback(torch.cuda.set_sync_debug_mode, "default")
        if self._ended == self._size.steps - 1:  # the last step ends the fit, which may wait
            self._open.close()
            steps = self._ended - self._size.warmup
            counts = collections.Counter(
                _short(warning) for warning in self._caught if "synchronizing CUDA" in str(warning.message)
            )
            self.waits = {place: count / steps for place, count in counts.items()}


def _short(warning: Any) -> str:
    path = Path(warning.filename)
    return f"{'/'.join(path.parts[-3:])}:{warning.lineno}"


def waits(size: Size) -> dict[str, dict[str, float]]:
    """Waits for the device by what is trained; on a rank of its own, of one."""
    quiet()
    found = {}
    for name, strategy, kind, settings in (
        (OURS, HybridShardStrategy, Module, {}),
        (f"{OURS}, clipping", HybridShardStrategy, Module, {"gradient_clip_val": 1.0}),
        (f"{OURS}, accumulating", HybridShardStrategy, Module, {"accumulate_grad_batches": 2}),
        (f"{OURS}, bf16-mixed", HybridShardStrategy, Module, {"precision": "bf16-mixed"}),
        (f"{OURS}, a step that asks for its loss", HybridShardStrategy, AskingModule, {}),
        (LIGHTNING, lightnings, ShardedModule, {}),
    ):
        watch = Watch(size)
        fit(size, strategy(), kind(size), watch, **settings)  # type: ignore[operator]
        found[name] = watch.waits
    return found
