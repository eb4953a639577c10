"""Synchronized BatchNorm: statistics over the samples of all data ranks, for ``Trainer(sync_batchnorm=True)``.

torch's ``SyncBatchNorm`` runs on accelerators only, and replaces the layer by one of another class. Here a layer stays
the same object, with its name, hooks and buffers, and gets a subclass of its class. In training it uses the mean and
variance over all data ranks' samples. On an accelerator torch's own kernels compute them. On the CPU two all-reduces
do: of the sum of the samples, and of the sum of their squared distances to the mean.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import (
    SyncBatchNorm as _OnAccelerator,
)  # private: the function that nn.SyncBatchNorm calls (torch 2.11 to 2.14)
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shard.errors import StepError

_CLASSES: dict[type[_BatchNorm], type[_BatchNorm]] = {}


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def synchronize(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make ``module``'s BatchNorm layers use the statistics of all samples of a group's ranks in training, in place.

    Args:
        group: The ranks; ``None`` turns synchronization off again.
    """
    for layer in batch_norms(module).values():
        kind = type(layer)
        if not issubclass(kind, Synchronized):
            if group is None:
                continue
            if kind not in _CLASSES:
                _CLASSES[kind] = type(kind.__name__, (Synchronized, kind), {"__module__": kind.__module__})
            layer.__class__ = _CLASSES[kind]
        layer.__dict__["_over"] = _Over(group)


def broadcast_statistics(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Have all ranks of a group use the first rank's statistics. A collective call.

    Each data rank's are of its own samples, and a checkpoint holds the first rank's. So an evaluation uses these too,
    as it does under DDP, which broadcasts buffers in every forward.
    """
    if dist.get_world_size(group) == 1:
        return
    for layer in batch_norms(module).values():
        for buffer in layer.buffers(recurse=False):
            if type(buffer) is Tensor and not buffer.is_meta:  # else another stage's
                dist.broadcast(buffer, group=group, group_src=0)


class _Over:
    """Holds a process group; a deep copy of a layer shares it, since groups can't be copied."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, _: Any) -> _Over:
        return self


class Synchronized(_BatchNorm):
    """Mixin for a BatchNorm layer that is synchronized. Pickling restores the layer's original class."""

    _over: _Over

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not the layer's class's: a registry isn't told of this one, and it is given no arguments."""

    def __reduce__(self) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key != "_over"}
        return object.__new__, (type(self).__mro__[2],), state

    def __deepcopy__(self, memo: dict[int, Any]) -> Synchronized:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def forward(self, input: Tensor) -> Tensor:
        group = self._over.group
        if group is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, share = self._to_track()
        if input.device.type != "cpu":
            size = dist.get_world_size(group)
            weight, bias = self.weight, self.bias
            return _OnAccelerator.apply(input, weight, bias, mean, variance, self.eps, share, group, size)  # type: ignore[no-any-return]
        return self._on_host(input, group, mean, variance, share)

    def _to_track(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The running mean and variance, and the weight of this batch in them; increments the batch counter."""
        if not self.track_running_stats:
            return None, None, 0.0
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        return self.running_mean, self.running_var, share

    def _on_host(
        self, input: Tensor, group: dist.ProcessGroup, tracked_mean: Tensor | None, tracked: Tensor | None, share: float
    ) -> Tensor:
        x = input if input.dtype in (torch.float32, torch.float64) else input.float()
        dims = [dim for dim in range(x.ndim) if dim != 1]
        of_channels = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        here = x.new_full((1,), x.numel() // x.size(1))
        sums: Tensor = _Summed.apply(torch.cat([x.sum(dims), here]), group)
        count = sums[-1].detach()
        if count <= 1:
            raise StepError(
                f"{type(self).__name__} got one value per channel from all data ranks together (here an input of shape"
                f" {tuple(input.shape)}), which has no variance: train with larger batches (drop_last=True if only the"
                " last one is so small), or without sync_batchnorm in evaluation mode."
            )
        mean = sums[:-1] / count
        centred = x - mean.view(of_channels)
        variance: Tensor = _Summed.apply(centred.square().sum(dims), group) / count
        if tracked_mean is not None and tracked is not None:
            with torch.no_grad():
                tracked_mean.lerp_(mean.to(tracked_mean.dtype), share)
                tracked.lerp_((variance * (count / (count - 1))).to(tracked.dtype), share)
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        out = centred * scale.view(of_channels)
        if self.bias is not None:
            out = out + self.bias.view(of_channels)
        return out.to(input.dtype)


class _Summed(torch.autograd.Function):
    """All-reduced sum over a group's ranks; its backward all-reduces the gradients of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(gradient, ctx.group), None
