"""Let plain tensors meet sharded parameters between steps, as in ``average - p`` (latent diffusion's ``LitEma``).

A plain tensor is taken for a whole one, equal on all ranks, which is compared: twice for each tensor, since averages
are the same tensors after each step. What is computed is sharded as the parameter is; a plain tensor that is changed in
place (``average.add_(p)``) takes the whole parameter. Both are collective over the parameter's ranks.

In steps a plain tensor may be a rank's own part, such as features that a plan splits. There torch's refusal stays.

Private: ``DTensor.__torch_function__``, which torch (2.11 to 2.14) disables, and does here while steps run. Its
dispatcher, in C++, refuses plain tensors before it asks anything that could be patched.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.as_tensors import full, is_plain, reduced
from lightning_shard.torch_private import replaced

_COMPARISONS = 2
"""Of one tensor: the first time it may be as it was made, such as zeros."""
_LEFT = {Tensor.copy_, Tensor.__setitem__}
"""``as_tensors.py`` knows these."""


_compared: Any = WeakIdKeyDictionary()
"""How often a tensor was compared."""


def run() -> AbstractContextManager[None]:
    """Context of a Trainer's run."""
    return replaced((DTensor, "__torch_function__", _BETWEEN))


def step() -> AbstractContextManager[None]:
    """Context of what a run computes in steps: forwards, backwards and optimizer steps."""
    return replaced((DTensor, "__torch_function__", _DISABLED))


def _between(_: Any, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) == 1 and not kwargs:  # reads of attributes, such as p.grad
            return func(*args)
        given = [*args, *kwargs.values()]
        plain = [each for each in given if is_plain(each) and each.numel() > 1]
        sharded = next((each for each in given if isinstance(each, DTensor)), None)
        if not plain or sharded is None or func in _LEFT:
            return func(*args, **kwargs)
        for each in plain:
            _compare(each, sharded.device_mesh)
        name = getattr(func, "__name__", "")
        if args and is_plain(args[0]) and name.endswith("_") and not name.endswith("__"):
            return func(*full(args), **full(kwargs))
        with implicit_replication():
            return func(*map(_reduced, args), **{key: _reduced(each) for key, each in kwargs.items()})


_BETWEEN, _DISABLED = classmethod(_between), vars(DTensor)["__torch_function__"]


def _reduced(value: Any) -> Any:
    return reduced(value) if isinstance(value, DTensor) else value


def _compare(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Compare a tensor over a mesh's ranks; a collective call over them.

    Raises:
        StepError: On every rank, if they have other values.
    """
    if (times := _compared.get(tensor, 0)) == _COMPARISONS:
        return
    _compared[tensor] = times + 1
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()
    own = torch.stack([wide.sum(), wide.norm()]).to(mesh.device_type).view(torch.int64)
    both = torch.stack([own, ~own])  # the largest of a number and of its complement show whether all are equal
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if not torch.equal(both[0], ~both[1]):
        raise StepError(
            f"Between steps a plain tensor of shape {tuple(tensor.shape)} meets a sharded parameter, and has other"
            " values on other ranks, each of which would change its own part of the parameter by its own values: make"
            " it equal on all, as by trainer.strategy.reduce(values) or fabric.all_reduce(values).",
            breaks=9,
        )
