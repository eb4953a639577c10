"""Warns, in the first steps, of state that a pipelined step updates once per microbatch instead of once per batch.

Counters and statistics have the last stage's value on all stages, but each microbatch has updated them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard.errors import WHOLE_BATCHES
from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.plugin.steps.state.python_state import children, reachable

_NAMED = 4
_LARGEST_LOOKED_AT = 2**24
"""Largest tensor that is examined, in elements: statistics are small, larger tensors are data."""


@contextmanager
def warning_of_numbers_kept(
    module: pl.LightningModule, method: str, microbatches: int, *, within: bool = False
) -> Iterator[None]:
    """Warn on this rank of numbers that a pipelined step changes: counters, running sums.

    Args:
        within: Examine numbers on submodules, in dicts and objects inside of the LightningModule, and in globals,
            instead of its attributes. A first step fills caches there; later steps don't grow them.
    """
    before = _numbers(module, within)
    yield
    # as text, where NaN equals itself
    changed = [name for name, value in _numbers(module, within).items() if repr(before.get(name, value)) != repr(value)]
    if changed:
        named = ", ".join(changed[:_NAMED]) + (f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else "")
        warnings.warn(
            f"{method} changed {named}. With several pipeline stages a step"
            f" runs for each of {microbatches} microbatches, and to its end on the last stage only: count batches in"
            " on_train_batch_end (on_validation_batch_end, …), and samples by a torchmetrics metric; or use"
            f" {WHOLE_BATCHES}.",
            stacklevel=2,
        )


def _numbers(module: pl.LightningModule, within: bool) -> dict[str, float]:
    if not within:
        return {f"self.{name}": value for name, value in vars(module).items() if type(value) in (int, float)}
    return {
        f"{path}.{name}": value
        for path, holder in reachable(module)
        if holder is not module and not isinstance(holder, Metric)
        for name, value in children(holder)
        if type(value) in (int, float)
    }


@contextmanager
def warning_of_tensors_changed(module: nn.Module, microbatches: int) -> Iterator[None]:
    """Warn on this rank of tensors that a pipelined training step changes: statistics, losses, hidden states.

    Examined are buffers, attributes, and what containers, objects and globals hold, without a graph. Whether a step
    changes a tensor that it created can't be known from that step (a cache, say, isn't changed), so a second step is
    examined too. One that replaces a tensor by another of another shape, such as a table of positions, creates it.
    BatchNorm's statistics are known, and a metric's state says how microbatches add up: both are skipped.
    """
    before = _sums_of_tensors(module)
    yield
    now = _sums_of_tensors(module)
    changed = [
        name
        for name, (shape, sums) in before.items()
        if name in now and now[name][0] == shape and now[name][1].tolist() != sums.tolist()
    ]
    if changed:
        warnings.warn(
            f"training_step changed {changed[0]}{f' and {len(changed) - 1} other tensors' * (len(changed) > 1)}."
            f" With several pipeline stages it does so for each of {microbatches} microbatches, by that one's samples:"
            " moving averages, and what a later step or a hook reads, differ from one process that has the batch at"
            " once. Keep what training_step returns, or what is in trainer.callback_metrics, in on_train_batch_end; or"
            f" use {WHOLE_BATCHES}.",
            stacklevel=2,
        )


@torch.no_grad()
def _sums_of_tensors(module: nn.Module) -> dict[str, tuple[torch.Size, Tensor]]:
    """The shape, sum and norm of each tensor, and array, of floats, with 0 for NaN.

    Version counters don't show changes made through ``.data``, and arrays have none.
    """
    norms, found = {id(part) for part in batch_norms(module).values()}, [*reachable(module)]
    known = tuple(f"{path}." for path, part in found if isinstance(part, Metric) or id(part) in norms)
    return {
        path.replace("_buffers.", ""): (
            tensor.shape,
            torch.stack([(wide := tensor.double().nan_to_num()).sum(), wide.norm()]),
        )
        for path, value in found
        for tensor in [torch.tensor(value) if _is_of_floats(value) else value]
        if type(tensor) is Tensor and tensor.is_floating_point() and not path.startswith(known)
        if tensor.layout is torch.strided and not (tensor.is_meta or tensor.requires_grad)
        if tensor.numel() <= _LARGEST_LOOKED_AT
    }


def _is_of_floats(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64)
