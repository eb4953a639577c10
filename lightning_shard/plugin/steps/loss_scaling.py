"""Synchronizes fp16 loss scaling: if gradients overflow on any rank, all ranks skip the step and lower the scale.

``GradScaler._unscale_grads_`` (torch 2.11 to 2.14) is where a scaler detects overflows. By itself a rank sees only the
gradients of its own stage and shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import ConfigurationError
from lightning_shard.sharding import local_tensor


def agree_on_overflows(scaler: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make a ``GradScaler`` detect overflows on any rank; its steps become collective calls over all ranks.

    Raises:
        ConfigurationError: An optimizer that unscales gradients itself.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigurationError(
                f"{type(optimizer).__name__}(fused=True) unscales gradients by itself, which precision='16-mixed' does"
                " over all ranks: leave fused=True out, or use bf16-mixed.",
                breaks=11,
            )
    scaler.__dict__["_unscale_grads_"] = _unscale


@torch.no_grad()
def _unscale(
    optimizer: torch.optim.Optimizer, inverse: Tensor, overflow: Tensor, _allow_fp16: bool
) -> dict[torch.device, Tensor]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, _), alike in by_kind.items():
        found = torch.zeros_like(overflow, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, inverse.to(device))
        overflow = torch.maximum(overflow, found.to(overflow.device))
    if dist.is_initialized():
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return {overflow.device: overflow}
