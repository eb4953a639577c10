"""Run Adam's updates on local shards, which avoids a DTensor dispatch in Python per operation and parameter.

Adam's update is elementwise: a shard's update needs only the same shard of the gradient and of the moments. On DTensors
the result is the same.

Private: ``Adam._init_group`` (torch 2.11 to 2.14), which fills the lists of tensors that a step works on. An optimizer
without it is left unchanged. ``DTensor._local_tensor`` and ``_spec`` are what ``to_local()`` and the properties give
without gradients, each by a call in Python.
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
        filled = [each for each in (parameters, *others[:-1]) if each]  # the last list has the step counters
        if group["differentiable"]:
            return result
        for row in zip(*filled):  # a parameter, and what its update works with
            first: Any = getattr(row[0], "_spec", None)
            for tensor in row:
                spec = tensor._spec if isinstance(tensor, DTensor) else None
                # with other placements an update communicates, as for a gradient that is still Partial
                if spec is not first and (
                    not spec or not first or spec.placements != first.placements or spec.mesh != first.mesh
                ):
                    return result
        for each in filled:
            each[:] = [t._local_tensor if isinstance(t, DTensor) else t for t in each]  # gradients are off
        return result

    optimizer.__dict__["_init_group"] = init_group
