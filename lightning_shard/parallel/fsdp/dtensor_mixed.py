"""Let plain tensors meet sharded parameters between steps, as in ``average - p`` (latent diffusion's ``LitEma``).

A plain tensor is taken for a whole one, equal on all ranks, which is compared: twice for each tensor, since averages
are the same tensors after each step. What is computed is sharded as the parameter is; a plain tensor that is changed in
place (``average.add_(p)``) takes the whole parameter. Both are collective over the parameter's ranks.

In steps a plain tensor may be a rank's own part, such as features that a plan splits. There torch's refusal stays.

Private: ``DTensor.__torch_function__``, which torch (2.11 to 2.14) disables, and does here while steps run. Its
dispatcher, in C++, refuses plain tensors before it asks anything that could be patched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shard.errors import StepError
from lightning_shard.sharding import full_tensor

_COMPARISONS = 2
"""Of one tensor: the first time it may be as it was made, such as zeros."""
_LEFT = {Tensor.copy_, Tensor.__setitem__}
"""``dtensor_writes.py`` knows these."""


class _Now:
    runs = 0
    steps = 0


_compared: Any = WeakIdKeyDictionary()
"""How often a tensor was compared."""
_sharded: Any = DTensor
_disabled: Any = _sharded.__dict__["__torch_function__"]


@contextmanager
def run() -> Iterator[None]:
    """Context of a Trainer's run."""
    with _counted("runs"):
        yield


@contextmanager
def step() -> Iterator[None]:
    """Context of what a run computes in steps: forwards, backwards and optimizer steps."""
    with _counted("steps"):
        yield


@contextmanager
def _counted(what: str) -> Iterator[None]:
    setattr(_Now, what, getattr(_Now, what) + 1)
    _switch()
    try:
        yield
    finally:
        setattr(_Now, what, getattr(_Now, what) - 1)
        _switch()


def _switch() -> None:
    is_between = bool(_Now.runs) and not _Now.steps
    wanted = _BETWEEN if is_between else _disabled
    if _sharded.__dict__["__torch_function__"] is not wanted:
        _sharded.__torch_function__ = wanted


def _between(_: Any, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) == 1 and not kwargs:  # reads of attributes, such as p.grad
            return func(*args)
        given = [*args, *kwargs.values()]
        plain = [each for each in given if _is_plain(each) and each.numel() > 1]
        sharded = next((each for each in given if isinstance(each, DTensor)), None)
        if not plain or sharded is None or func in _LEFT:
            return func(*args, **kwargs)
        for each in plain:
            _compare(each, sharded.device_mesh)
        name = getattr(func, "__name__", "")
        if args and _is_plain(args[0]) and name.endswith("_") and not name.endswith("__"):
            return func(*map(_whole, args), **{key: _whole(each) for key, each in kwargs.items()})
        with implicit_replication():
            return func(*map(_reduced, args), **{key: _reduced(each) for key, each in kwargs.items()})


_BETWEEN = classmethod(_between)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _whole(value: Any) -> Any:
    return full_tensor(value) if isinstance(value, DTensor) else value


def _reduced(value: Any) -> Any:
    """A tensor whose ranks' parts are still to be joined, such as ``p.norm()``, as they are joined."""
    if not isinstance(value, DTensor) or not any(each.is_partial() for each in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if each.is_partial() else each for each in value.placements])


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
            " it equal on all, as by trainer.strategy.reduce(values) or self.all_gather(values).mean(0)."
        )
