"""Measures the times of a module's blocks and parts on the device at hand, to replace a profile's peaks.

The module is built on the device with random weights, and its own step runs forward and backward a few times, timed by
hooks that synchronize the device. The fastest run of each part counts, since other programs can only slow it down.
Links aren't measured.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.dryrun.counting.counts import AROUND, LOSS
from lightning_shard.dryrun.counting.model import Model, fake_trainer
from lightning_shard.dryrun.timing.devices import Device, Link
from lightning_shard.dryrun.timing.devices import device as device_of
from lightning_shard.dryrun.timing.rates import Measured
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.containers import with_forward
from lightning_shard.plugin import trainer_private
from lightning_shard.plugin.assembly.example import part_of
from lightning_shard.plugin.settings import Settings
from lightning_shard.scripted import after_calls, before_calls

_MATRIX = {"cpu": 512, "cuda": 4096}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kind_at_hand() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def calibrate(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    microbatches: int = 1,
    pipeline_blocks: str | Sequence[str] | None = None,
    precision: str = "32-true",
    device_type: str = "cpu",
    times: int = 5,
) -> Measured:
    """Measure forward and backward of each block and part, on one microbatch.

    Args:
        module: A LightningModule, which isn't modified, or a function that builds one.
        batch: What one data-parallel rank reads for a step; its values are used if it has data (isn't on meta).
        microbatches: Microbatches per batch; the first one is run.
        pipeline_blocks, precision: As for the strategy and the Trainer.
        device_type: ``"cuda"`` or ``"cpu"``.
        times: The number of measured runs, after a warm-up run.

    Raises:
        ConfigurationError: The step can't be run here, or the device has too little memory.
    """
    precision = trainer_private.named_precision(precision)
    settings = Settings("auto", pipeline_blocks, None, gathered_dtype=trainer_private.GATHERED.get(precision))
    model = Model.of(module, batch, settings, stages=1, precision=precision, device_type=device_type)
    part = tree.split(model.batch, microbatches)[0]
    device = torch.device(device_type)
    try:
        real = _on_device(model, device)
        given = tree.map_leaves(partial(_real, device=device), part)
        seconds = _Stopwatch(real, model, device).measure(given, times)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{type(model.module).__name__} has no room on {device}, where it was to be measured: measure one with"
            " fewer blocks of the same size, or use a profile."
        ) from error
    name = torch.cuda.get_device_name(device) if device_type == "cuda" else "this machine's CPU"
    return Measured(seconds, tree.batch_size(part), name)


def device_at_hand(kind: str, base: str | Mapping[str, Any] | Device | None = None) -> Device:
    """A profile of the device at hand, with measured matrix products and memory bandwidth.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        base: The profile to take links from; without it, links cost nothing.
    """
    device = torch.device(kind)
    memory = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else _host_memory()
    if base is not None:
        links = device_of(base)
        notes: tuple[str, ...] = (f"links as of {links.name}, not measured", *links.notes)
    else:
        free = Link(float("inf"), 0.0)
        links = replace(device_of("h100"), inside=free, between=free, per_machine=1)
        notes = ("nothing is counted for links: they aren't measured, and no --device was named",)
    return replace(
        links,
        name=f"this machine ({kind})",
        flops=_products(device),
        memory=memory,
        memory_bandwidth=_bandwidth(device),
        achieved=replace(links.achieved, compute=1.0, memory=1.0),
        source="measured here",
        notes=notes,
        host_bandwidth=None,
    )


def _on_device(model: Model, device: torch.device) -> pl.LightningModule:
    """The module on a device, with small random weights."""
    module = model.copy().to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02) if parameter.is_floating_point() else parameter.zero_()
        for buffer in module.buffers():
            buffer.zero_()
    return module.train()


def _real(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.zeros_like(leaf, device=device) if leaf.is_meta else leaf.to(device)


class _Stopwatch:
    """Attributes time to parts.

    In the forward, a part's time is from its begin to its end. In the backward, it is from the moment when the gradient
    of its output is ready to the moment when that of another part's output is.
    """

    def __init__(self, module: pl.LightningModule, model: Model, device: torch.device) -> None:
        self._module, self._model, self._device = module, model, device
        self._running: list[str] = []
        self._left = 0
        self._now_of: tuple[str, int] | None = None
        self._since = 0.0
        self._taken: dict[tuple[str, int], float] = {}

    def measure(self, batch: Any, times: int) -> dict[str, tuple[float, float]]:
        blocks = self._model.blocks
        names = blocks.names if blocks is not None else ()
        parts = [name for name, _ in blocks.parts] if blocks is not None else []
        turns = []
        with ExitStack() as stack, fake_trainer(self._module):
            for name in dict.fromkeys([*names, *parts]):
                part = part_of(self._module, name)
                for called in with_forward(part) if isinstance(part, nn.Module) else ():
                    stack.callback(before_calls(called, partial(self._begin, name)).remove)
                    stack.callback(after_calls(called, partial(self._end, name in names)).remove)
            for _ in range(times + 1):
                turns.append(self._turn(batch, len(names)))
        keys = {name for turn in turns for name, _ in turn}
        # the first run is a warm-up: it allocates memory and selects kernels
        least = {(name, way): min(turn.get((name, way), 0.0) for turn in turns[1:]) for name in keys for way in (0, 1)}
        runs = Counter(names)
        return {name: (least[name, 0] / max(1, runs[name]), least[name, 1] / max(1, runs[name])) for name in keys}

    def _turn(self, batch: Any, blocks: int) -> dict[tuple[str, int], float]:
        self._module.zero_grad()
        self._taken, self._left = {}, blocks
        self._switch((AROUND if blocks else LOSS, 0))
        dtype = trainer_private.GATHERED.get(self._model.precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            loss = self._model.loss_of(self._module, batch)
        self._switch((LOSS, 1))
        loss.backward()
        self._switch(None)
        return self._taken

    def _switch(self, to: tuple[str, int] | None) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._now_of is not None:
            self._taken[self._now_of] = self._taken.get(self._now_of, 0.0) + now - self._since
        self._now_of, self._since = to, now

    def _begin(self, name: str, *_: Any) -> None:
        self._running.append(name)
        self._switch((name, 0))

    def _end(self, is_block: bool, _part: nn.Module, _args: Any, output: Any) -> None:
        name = self._running.pop()
        self._left -= is_block
        for tensor in tree.tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, name))
        outside = AROUND if self._left > 0 else LOSS
        self._switch((self._running[-1] if self._running else outside, 0))

    def _begin_backward(self, name: str, _gradient: Tensor) -> None:
        self._switch((name, 1))


def _products(device: torch.device) -> dict[str, float]:
    """Measured FLOP/s of a product of large matrices, by dtype."""
    size = _MATRIX[device.type]
    found = {}
    for name, dtype in _DTYPES.items():
        a = torch.ones(size, size, dtype=dtype, device=device)
        found[name] = 2 * size**3 / _fastest(partial(torch.matmul, a, a), device)
    return found


def _bandwidth(device: torch.device) -> float:
    """Measured bytes per second that a copy reads and writes."""
    source = torch.ones(2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _fastest(lambda: target.copy_(source), device)


def _fastest(run: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
