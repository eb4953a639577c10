"""Synchronized BatchNorm: statistics over the samples of all data ranks, for ``Trainer(sync_batchnorm=True)``.

torch's ``SyncBatchNorm`` runs on accelerators only, and replaces the layer by one of another class. Here a layer stays
the same object, with its name, hooks and buffers, and gets a ``forward`` of its own. In training it uses the mean and
variance over all data ranks' samples. On an accelerator torch's own kernels compute them. On the CPU two all-reduces
do: of the sum of the samples, and of the sum of their squared distances to the mean.
"""

from __future__ import annotations

from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules._functions import (
    SyncBatchNorm as _OnAccelerator,
)  # private: the function that nn.SyncBatchNorm calls (torch 2.11 to 2.14)

from lightning_shard.errors import StepError
from lightning_shard.parallel.collectives import summed_both_ways
from lightning_shard.torch_private import BatchNorm


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """The BatchNorm layers of a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, BatchNorm)}


def synchronize(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make ``module``'s BatchNorm layers use the statistics of all samples of a group's ranks in training, in place.

    Args:
        group: The ranks; ``None`` turns synchronization off again.
    """
    for layer in batch_norms(module).values():
        own = vars(layer)
        if isinstance(getattr(own.get("forward"), "__func__", None), _Synchronized):
            del own["forward"]
        if group is not None and "forward" not in own:  # else another stage's
            own["forward"] = MethodType(_Synchronized(group), layer)


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


class _Synchronized:
    """The forward of a layer, as its method: a deep copy of the layer is synchronized too, and one pickled isn't."""

    __name__ = "forward"  # by which a method is pickled

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, layer: BatchNorm, input: Tensor) -> Tensor:
        group = self._group
        if not layer.training:
            return type(layer).forward(layer, input)
        layer._check_input_dim(input)
        mean, variance, share = _to_track(layer)
        if input.device.type != "cpu":
            size = dist.get_world_size(group)
            return _OnAccelerator.apply(input, layer.weight, layer.bias, mean, variance, layer.eps, share, group, size)  # type: ignore[no-any-return]
        return _on_host(layer, input, group, mean, variance, share)


def _to_track(layer: BatchNorm) -> tuple[Tensor | None, Tensor | None, float]:
    """The running mean and variance, and the weight of this batch in them; increments the batch counter."""
    if not layer.track_running_stats:
        return None, None, 0.0
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    return layer.running_mean, layer.running_var, share


def _on_host(
    layer: BatchNorm,
    input: Tensor,
    group: dist.ProcessGroup,
    tracked_mean: Tensor | None,
    tracked: Tensor | None,
    share: float,
) -> Tensor:
    x = input if input.dtype in (torch.float32, torch.float64) else input.float()
    dims = [dim for dim in range(x.ndim) if dim != 1]
    of_channels = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
    here = x.new_full((1,), x.numel() // x.size(1))
    sums = summed_both_ways(torch.cat([x.sum(dims), here]), group)
    count = sums[-1].detach()
    if count <= 1:
        raise StepError(
            f"{type(layer).__name__} got one value per channel from all data ranks together (here an input of shape"
            f" {tuple(input.shape)}), which has no variance: train with larger batches (drop_last=True if only the"
            " last one is so small), or without sync_batchnorm in evaluation mode."
        )
    mean = sums[:-1] / count
    centred = x - mean.view(of_channels)
    variance = summed_both_ways(centred.square().sum(dims), group) / count
    if tracked_mean is not None and tracked is not None:
        with torch.no_grad():
            tracked_mean.lerp_(mean.to(tracked_mean.dtype), share)
            tracked.lerp_((variance * (count / (count - 1))).to(tracked.dtype), share)
    scale = (variance + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    out = centred * scale.view(of_channels)
    if layer.bias is not None:
        out = out + layer.bias.view(of_channels)
    return out.to(input.dtype)
