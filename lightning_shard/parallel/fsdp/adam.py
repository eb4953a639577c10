"""Run Adam's updates on local shards, which avoids a DTensor dispatch in Python per operation and parameter.

Adam's update is elementwise: a shard's update needs only the same shard of the gradient and of the moments. On DTensors
the result is the same.

Private: ``Adam._init_group`` (torch 2.11 to 2.13), which fills the lists of tensors that a step works on. An optimizer
without it is left unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def update_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make torch's Adam or AdamW update local shards, in place; subclasses and other optimizers are left unchanged."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not hasattr(optimizer, "_init_group"):
        return
    whole = optimizer._init_group

    def init_group(group: dict[str, Any], parameters: list[Tensor], *others: list[Tensor]) -> Any:
        result = whole(group, parameters, *others)
        *sharded, _ = others  # the last list has the step counters
        shardings = [*map(_sharding, parameters)]
        # with other placements an update communicates, as for a gradient that is still Partial
        if not group["differentiable"] and all([*map(_sharding, each)] == shardings for each in sharded if each):
            for each in (parameters, *sharded):
                each[:] = [t.to_local() if isinstance(t, DTensor) else t for t in each]  # in no_grad: no autograd node
        return result

    optimizer.__dict__["_init_group"] = init_group


def _sharding(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
