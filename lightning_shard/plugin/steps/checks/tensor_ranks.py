"""What tensor ranks must have alike, and ranks that share sequences: compared in a run's first steps.

A tensor-parallel plan may leave out what runs on features that it splits. Nothing fails then, and each rank has its
part of a value, or one summand of a gradient, where one process has all. So compared are

* the gradients of parameters that aren't split, and buffers that steps change: the ranks' copies would diverge;
* losses, what steps return, and what they log: the user sees one rank's. A difference in what is logged is warned of,
  since it may be a time, or an amount of memory.

What runs in blocks, ``parallel/tensor/check_plan.py`` compares with whole layers. Limits: what begins to differ later,
what a step keeps itself or hooks are given, objects that it returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.errors import PlanError, StepError
from lightning_shard.lightning_private import logs_noted
from lightning_shard.parallel.rank_compare import (
    NOTHING,
    Fingerprint,
    differing,
    exchanged,
    fingerprints,
)
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.plugin.steps.checks.buffers import ChangedBuffers
from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.sharding import local_tensor

STEPS = frozenset({1, 2, 3, 4, 8, 16, 32, 64})
"""The steps, and optimizer steps, of a run that are checked. An adapter's gradients may be zero in the first, and a
loss may have an effect only later. Not all steps are: equal values may drift by rounding where sums have no fixed
order."""
_ROUNDING = 0.01
"""Sums taken in different orders by ranks differ by less, also in 16 bits. Relative to the norm."""
_NOISE = 1e-6
"""A gradient that is zero but for rounding may be up to this large, relative to the largest gradient's norm."""
_LOSS_ROUNDING = {True: 1e-5, False: 1e-3}
"""Relative difference allowed between losses that are computed alike: in 32 bits or more, and in fewer."""
_SHOWN_ROUNDING = {True: 1e-5, False: 0.02}
"""The same of what is logged and returned, relative to the norm or to 1 (whichever is larger): a number near 0 may be
the difference of larger ones."""

_STYLES = (
    'Give a module that runs on such features the style "replicated_with_grad_allreduce", and one that runs on whole'
    ' ones, and whose output meets them (a gate, or keys of a single head), "shared_output": these add gradients up. Or'
    " leave the layers around it out of the plan."
)
_LEAVE_OUT = "Leave the layers around it out of the plan, or give the one before it the style"
_GATHERED = '"colwise_gather_output" and the layer after it "rowwise_split_input".'


@dataclass
class Shown:
    """What a step shows to the user."""

    output: Any = None


class TensorRanks:
    """Compares the steps of one run over a tensor axis.

    Args:
        axis: A mesh of that one named dimension.
        buffers: Those that steps change.
        warns: Whether this axis' first rank warns.
    """

    def __init__(
        self, module: nn.Module, loop: Loop, axis: DeviceMesh, buffers: ChangedBuffers, *, warns: bool
    ) -> None:
        self._module = module
        self._in_32_bits = loop.in_32_bits
        self._axis = axis
        self._buffers = buffers
        self._warns = warns and axis.get_local_rank() == 0

    @contextmanager
    def comparing_what_is_shown(self, method: str, shown: Shown) -> Iterator[None]:
        """Compare what the first step of a kind, which runs inside, logs, and what it returns, as put in ``shown``.

        At its end, a collective call over the axis.
        """
        logs: dict[str, Fingerprint] = {}

        def note(name: str, value: Any) -> None:
            is_number = isinstance(value, (Tensor, int, float)) and not isinstance(value, (Unknown, DTensor))
            if name not in logs and is_number:  # a DTensor is logged whole
                logs.update(fingerprints({name: torch.as_tensor(value)}))

        with logs_noted(self._module, note):
            yield
        returned = fingerprints(_tensors(shown.output))
        of_logs, of_returned = exchanged(self._axis.get_group(), logs, returned)
        rounding = _SHOWN_ROUNDING[self._in_32_bits]
        for name in differing(of_returned, rounding, least=1.0)[:1]:
            named = f" ({name})" if name else ""
            raise PlanError(
                f"What {method} returns{named} isn't the same on the tensor ranks ({_said(of_returned[name])}):"
                f" {_CAUSE}"
            )
        for name in differing(of_logs, rounding, least=1.0)[: self._warns]:
            warnings.warn(
                f"{method} logs {name!r}, which is {_said(of_logs[name])} on the tensor ranks. If it is no time"
                f" or the like, {_CAUSE}",
                stacklevel=2,
            )

    def check_update(self) -> None:
        """Compare the gradients of what isn't split, and changed buffers; a collective call over the axis."""
        buffers = dict(self._module.named_buffers())
        changed = {
            name: values
            for name, values in self._buffers.changed().items()
            if name not in buffers or not is_split(buffers[name], self._axis)
        }
        gradients, changed_buffers = exchanged(self._axis.get_group(), _gradients(self._module, self._axis), changed)
        if wrong := differing(gradients, _ROUNDING, noise=_NOISE):
            raise PlanError(
                f"{few(wrong, 1)}: the tensor ranks have different gradients of it, so it, or what is computed with"
                f" it, is used on features that tensor_parallel_plan splits. {_STYLES}"
            )
        if wrong := differing(changed_buffers, _ROUNDING):
            raise PlanError(
                f"{few(wrong, 1)}: the tensor ranks have changed this buffer to different values, so it is computed"
                f" from features that tensor_parallel_plan splits. {_LEAVE_OUT} {_GATHERED}"
            )


def check_losses(output: Any, group: dist.ProcessGroup, *, shares_sequences: bool, in_32_bits: bool) -> None:
    """Compare the losses of a training step over ranks that must compute the same; a collective call over the group.

    Args:
        output: What the step returned: a loss, a dict with one, or none.
        shares_sequences: Whether the ranks share sequences, and not features.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    own = {"loss": loss} if isinstance(loss, Tensor) and loss.numel() == 1 else {}
    (found,) = exchanged(group, fingerprints(own))
    if not differing(found, _LOSS_ROUNDING[in_32_bits]):
        return
    said = _said(found["loss"])
    if shares_sequences:
        raise StepError(
            f"The ranks that share a sequence have different losses ({said}). What a block takes from an attribute, and"
            " not as an argument, has on each rank the gradient of its part of the sequence: right once parameters'"
            " gradients are averaged, but not where a step takes gradients itself, as for a penalty: pass it as an"
            " argument, or use context_parallel_size=1."
        )
    raise PlanError(
        f"The tensor ranks have different losses ({said}), so the step computes them with features or weights that"
        " tensor_parallel_plan splits. A hook on a layer between a colwise and a rowwise one is given such features:"
        f" leave the layers around it out of the plan, or give the first the style {_GATHERED} Of weights that are"
        " DTensors take p.full_tensor(), as for a penalty over self.parameters()."
    )


_CAUSE = (
    "it is computed from features or weights that tensor_parallel_plan splits, such as attention's weights"
    " (output_attentions=True), or keys and values, of which each rank has those of its own heads."
    f" {_LEAVE_OUT} {_GATHERED} Of weights that are DTensors take p.full_tensor()."
)


def _tensors(output: Any) -> dict[str, Tensor]:
    """All tensors and arrays, by path."""
    found: dict[str, Tensor] = {}
    for path, leaf in tree.walk(output):
        is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        if is_array or (isinstance(leaf, Tensor) and not isinstance(leaf, Unknown)):
            found[".".join(path)] = torch.as_tensor(leaf)
    return found


def _said(ranks: Mapping[int, Fingerprint]) -> str:
    def one(shape: tuple[int, ...], norm: float, total: float) -> str:
        return f"of shape {shape} and norm {norm:.7g}" if shape else f"{total:.7g}"

    return ", ".join(one(*each) for each in ranks.values())


def is_split(parameter: Tensor, axis: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    placed = dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements))
    return any(name in placed and not placed[name].is_replicate() for name in axis.mesh_dim_names or ())


def _gradients(module: nn.Module, axis: DeviceMesh) -> dict[str, Fingerprint]:
    """Of parameters that the axis doesn't split; a missing gradient counts as zeros."""
    whole = {name: p for name, p in module.named_parameters() if not is_split(p, axis)}
    own = {name: local_tensor(p.grad) for name, p in whole.items() if p.grad is not None}
    found = fingerprints(own)
    return {name: ((), *found.get(name, NOTHING)[1:]) for name in whole}
