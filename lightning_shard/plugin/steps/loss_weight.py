"""Weights the loss of each part of a global batch: ``HybridShardStrategy(loss_weight=…)``.

A loss may be a mean over the tokens that aren't padding. For a batch in parts with ``w_i`` such tokens and losses
``L_i``, the mean over the batch is ``Σ w_i L_i / Σ w_i``, not the mean of the ``L_i``. The weights are computed from
the batch, not in the step, since the first microbatch's backward runs before the last one's forward.

If gradients of 16-bit floats overflow on any rank, all ranks skip the step and lower the loss's scale:
``GradScaler._unscale_grads_`` (private, torch 2.11 to 2.14) is where a scaler detects overflows, and by itself a rank
sees only the gradients of its own stage and shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.parallel.clip import gradients_by_kind
from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans, without_those_by_zero
from lightning_shard.plugin.steps.metrics import SharedMetrics


class Weight(NamedTuple):
    """A microbatch's weight, as a multiple of its equal share; ``None``: exactly its equal share.

    Attributes:
        of_gradient: Relative to the microbatches of all data ranks, whose gradients are averaged.
        of_mean: Relative to the microbatches of this data rank.
    """

    of_gradient: Tensor | None = None
    of_mean: Tensor | None = None


class LossWeights:
    """Computes the weights of batches by a function ``weigh`` of them; ``None``: all parts count equally."""

    def __init__(self, weigh: Callable[[Any], Any] | None, group: dist.ProcessGroup, device: torch.device) -> None:
        self._weigh = weigh
        self._group = group
        self._device = device

    def number(self, part: Any) -> float:
        """What one part counts; waits for the device."""
        return 1.0 if self._weigh is None else float(_number(self._weigh(part), self._device))

    def of(self, parts: Sequence[Any]) -> list[Weight]:
        """The weights of this data rank's microbatches; a collective call over the data ranks."""
        if self._weigh is None:
            return [Weight()] * len(parts)
        own = torch.stack([_number(self._weigh(part), self._device) for part in parts])
        everywhere = own.sum()
        dist.all_reduce(everywhere, group=self._group)
        ranks = dist.get_world_size(self._group)
        shares = own * len(parts)
        return [Weight(*both) for both in zip(_part(shares * ranks, everywhere), _part(shares, own.sum()))]


@dataclass(frozen=True)
class Shares:
    """How much microbatches, and the batches of data ranks, count in losses, and in metrics that are means."""

    weights: LossWeights
    means: UnequalMeans
    metrics: SharedMetrics


def _part(shares: Tensor, total: Tensor) -> Tensor:
    """``shares / total``; 0 for a total of 0, not NaN, by which a backward would multiply gradients."""
    return torch.where(total == 0, 0.0, shares / total)


def _number(value: Any, device: torch.device) -> Tensor:
    try:
        weight = torch.as_tensor(value, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError):
        weight = None
    # a tensor's sign isn't checked, since that would wait for the device
    if weight is None or weight.numel() != 1 or (isinstance(value, (int, float)) and not value >= 0):
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise StepError(
            f"loss_weight gave {shown} for a batch, and must give how much its loss counts, a number of at least 0:"
            ' such as lambda batch: batch["mask"].sum().',
            breaks=5,
        )
    return weight.reshape(())


def loss_of(result: Any) -> Tensor:
    """The loss in what a training step returned, ``[]``."""
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"A training step returned {type(result).__name__}, and must return the loss, a tensor of one element, or a"
            " dict that holds it as 'loss'.",
            breaks=5,
        )
    return loss.reshape(())


def weighted_for_backward(loss: Tensor, weight: Tensor | None) -> Tensor:
    """:func:`weighted`, for a loss with a graph: where all weights are 0, gradients aren't NaN either."""
    if weight is None:
        return loss
    without_those_by_zero(loss, weight)
    return weighted(loss, weight)


def weighted(loss: Tensor, weight: Tensor | None) -> Tensor:
    """``weight × loss``; 0 for a weight of 0, where the loss is NaN as the mean over nothing."""
    if weight is None:
        return loss
    weight = weight.to(torch.promote_types(loss.dtype, torch.float32))
    return torch.where(weight > 0, loss * weight, 0.0)


def agree_on_overflows(scaler: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Make a ``GradScaler`` detect overflows on any rank; its steps become collective calls over all ranks."""
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
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for (device, _), alike in gradients_by_kind(parameters).items():
        found = torch.zeros_like(overflow, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, inverse.to(device))
        overflow = torch.maximum(overflow, found.to(overflow.device))
    if dist.is_initialized():
        dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return {overflow.device: overflow}
