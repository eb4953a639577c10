"""Compares over tensor ranks what a step logs and returns: a tensor-parallel plan may have split it.

Each tensor rank has the attention weights (``output_attentions``), keys and values of its own heads only. A loss that
is computed from them differs between ranks, and is refused elsewhere. But nothing fails where they are only logged or
returned, and the user sees one rank's part. So both are compared in the first step of each kind. A difference in what
is returned is refused. One in what is logged is warned of, since it may be a time, or an amount of memory.

Limits: differences that begin later, what a step keeps itself, and objects that it returns aren't detected.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.errors import PlanError
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.plugin.steps.checks.fingerprints import Outline, are_alike, outline

_ROUNDING = {True: 1e-5, False: 0.02}
"""Allowed difference, relative to the norm or to 1 (whichever is larger), of values that are computed alike: in 32 bits
or more, and in fewer. A number near 0 may be the difference of larger ones."""


@dataclass
class Shown:
    """What a step shows to the user.

    Attributes:
        output: What it returned.
    """

    output: Any = None


class NotesLogs:
    """Replaces a module's ``log``: records the first value logged under each name, then logs it."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.log = module.log
        self.found: dict[str, Outline] = {}

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.note(name, value)
        self.log(name, value, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return MethodType(type(self._module).log, copy.deepcopy(self._module, memo))

    def note(self, name: str, value: Any) -> None:
        value = value._forward_cache if isinstance(value, Metric) else value
        if name in self.found or isinstance(value, (Unknown, DTensor)):  # a DTensor is logged whole
            return
        if isinstance(value, (Tensor, int, float)):
            self.found[name] = outline(torch.as_tensor(value))


@contextmanager
def comparing_what_is_shown(
    module: pl.LightningModule, method: str, tensor_axis: DeviceMesh, *, warns: bool
) -> Iterator[Shown]:
    """Compare what the step that runs inside logs and returns; at its end, a collective call over the tensor axis.

    The caller stores the step's output in the yielded ``Shown``.

    Args:
        warns: Whether this axis' first rank warns.

    Raises:
        PlanError: On every rank of the axis, if returned tensors differ.
    """
    shown, before, logs = Shown(), module.__dict__.get("log"), NotesLogs(module)
    module.__dict__["log"] = logs
    try:
        yield shown
    finally:
        if before is None:
            del module.__dict__["log"]
        else:
            module.__dict__["log"] = before
    everyone: list[Any] = [None] * tensor_axis.size()
    dist.all_gather_object(everyone, (logs.found, _returned(shown.output)), tensor_axis.get_group())
    rounding = _ROUNDING["16" not in str(module.trainer.precision)]
    logged, returned = (_first_apart([rank[kind] for rank in everyone], rounding) for kind in range(2))
    if returned is not None:
        name, ranks = returned
        named = f" ({name})" if name else ""
        raise PlanError(f"What {method} returns{named} isn't the same on the tensor ranks ({_shown(ranks)}): {_CAUSE}")
    if logged is not None and warns and tensor_axis.get_local_rank() == 0:
        name, ranks = logged
        warnings.warn(
            f"{method} logs {name!r}, which is {_shown(ranks)} on the tensor ranks. If it is no time or the like,"
            f" {_CAUSE}",
            stacklevel=2,
        )


_CAUSE = (
    "it is computed from features or weights that tensor_parallel_plan splits, such as attention's weights"
    " (output_attentions=True), or keys and values, of which each rank has those of its own heads. Leave the layers"
    ' around it out of the plan, or give those before it the style "colwise_gather_output" and the layer after it'
    ' "rowwise_split_input"; of weights that are DTensors take p.full_tensor().'
)


def _returned(output: Any) -> dict[str, Outline]:
    """Outlines of all tensors and arrays, by path."""
    found: dict[str, Outline] = {}
    for path, leaf in tree.walk(output):
        is_array = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        if is_array or (isinstance(leaf, Tensor) and not isinstance(leaf, Unknown)):
            found[".".join(path)] = outline(torch.as_tensor(leaf))
    return found


def _first_apart(ranks: list[Mapping[str, Outline]], rounding: float) -> tuple[str, list[Outline]] | None:
    for name in ranks[0]:
        of_each = [rank[name] for rank in ranks if name in rank]
        if not all(are_alike(of_each[0], other, rounding, least=1.0) for other in of_each):
            return name, of_each
    return None


def _shown(ranks: list[Outline]) -> str:
    def one(shape: tuple[int, ...], norm: float, total: float) -> str:
        return f"of shape {shape} and norm {norm:.7g}" if shape else f"{total:.7g}"

    return ", ".join(one(*rank) for rank in ranks)
