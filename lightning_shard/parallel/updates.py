"""Adam's updates on each rank's own shards, without a dispatch of DTensors for each operation.

An update of Adam's is elementwise: a shard's needs that shard of the gradient and of the moments, nothing else. As
DTensors they take the same numbers to the same memory, and each operation and parameter has a dispatch in Python.

``Adam._init_group`` is private in torch (seen in 2.11 to 2.13): it fills the lists that a step works on. An optimizer
that has none is left as it is. So are ``DTensor._local_tensor`` and ``_spec``: what ``to_local()`` and its properties
give without gradients, each by a call in Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def update_shards(optimizer: torch.optim.Optimizer) -> None:
    """Have an Adam or AdamW of torch's, of just that class, update the shards; others stay as they are."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not hasattr(optimizer, "_init_group"):
        return
    whole = optimizer._init_group

    def init_group(group: dict[str, Any], parameters: list[Tensor], *others: list[Tensor]) -> Any:
        result = whole(group, parameters, *others)
        filled = [each for each in (parameters, *others[:-1]) if each]  # the last are the numbers of steps
        # else an update moves data between ranks, as of a gradient that is a sum yet to be taken
        if not group["differentiable"] and all(map(_are_sharded_alike, zip(*filled))):
            for each in filled:
                each[:] = [t._local_tensor if isinstance(t, DTensor) else t for t in each]  # gradients are off
        return result

    optimizer.__dict__["_init_group"] = init_group


def _are_sharded_alike(tensors: tuple[Tensor, ...]) -> bool:
    """A parameter, and what its update works with."""
    first = tensors[0]
    if not isinstance(first, DTensor):
        return not any(isinstance(t, DTensor) for t in tensors)
    spec = first._spec
    for t in tensors:
        if not isinstance(t, DTensor):
            return False
        if t._spec is not spec and (t._spec.mesh, t._spec.placements) != (spec.mesh, spec.placements):
            return False
    return True
