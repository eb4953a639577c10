"""Warns of user hooks on modules whose features a tensor-parallel plan splits: they get this rank's features only.

A loss or a buffer that is computed from these differs between tensor ranks, and is refused elsewhere. But what a hook
keeps in lists or numbers would silently be rank 0's part. So in the first step of each kind, inputs and outputs of
modules with user hooks are compared over the tensor ranks.

Limits: hooks that are registered later, and what a network's own code keeps, aren't detected.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard import tree
from lightning_shard.parallel.probe_arguments import has_other_hooks
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.plugin.steps.checks.fingerprints import Outline, are_alike, outline

_PACKAGES = ("torch.", "lightning.", "lightning_shard.")
_ROUNDING = 0.01
"""Sums taken in different orders by ranks differ by less, also in 16 bits. Relative to the norm."""


@contextmanager
def warning_of_split_features(module: nn.Module, tensor_axis: DeviceMesh, *, warns: bool) -> Iterator[None]:
    """Compare hooked modules' inputs and outputs in the step that runs inside; at its end, collective over the axis.

    Args:
        warns: Whether this axis' first rank warns.
    """
    looks = {name: (_Look(), part) for name, part in module.named_modules() if has_other_hooks(part, _PACKAGES)}
    handles = [part.register_forward_hook(look.at) for look, part in looks.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    seen = {name: look.seen for name, (look, _) in looks.items() if look.seen is not None}
    everyone: list[Any] = [None] * tensor_axis.size()
    dist.all_gather_object(everyone, seen, group=tensor_axis.get_group())
    parts = [name for name in seen if not _are_alike([rank.get(name) for rank in everyone])]
    if parts and warns and tensor_axis.get_local_rank() == 0:
        more = f" and on {len(parts) - 1} more modules" if len(parts) > 1 else ""
        warnings.warn(
            f"A hook on {parts[0]}{more} is given the part of the features that this tensor rank computes, since"
            " tensor_parallel_plan splits them: what it keeps or logs is of that part, and not of the whole. Put it on"
            " the block, leave the layers around it out of the plan, or give the one before it the style"
            ' "colwise_gather_output" and the layer after it "rowwise_split_input".',
            stacklevel=2,
        )


class _Look:
    """Outlines of a module's inputs and outputs in its first call.

    A class of this package, so that no stage takes the record for state of the module.
    """

    def __init__(self) -> None:
        self.seen: list[Outline] | None = None

    def at(self, _: nn.Module, given: Any, returned: Any) -> None:
        if self.seen is None:
            self.seen = [outline(each) for each in tree.tensors((given, returned)) if not isinstance(each, Unknown)]


def _are_alike(ranks: list[list[Outline] | None]) -> bool:
    """Whether the ranks that have seen a call have seen equal tensors."""
    is_alike = partial(are_alike, rounding=_ROUNDING)
    known = [rank for rank in ranks if rank is not None]
    return all(len(rank) == len(known[0]) and all(map(is_alike, known[0], rank)) for rank in known)
