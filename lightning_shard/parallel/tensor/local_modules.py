"""Let modules run their own code on this rank's part of their parameters; the autograd functions between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_shard.sharding import parameter_like, part_on


def split_parameter(module: nn.Module, key: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Make a module's parameter a DTensor on a mesh, in place.

    Every rank holds the same full values, or is on meta, so each keeps its own part without communication.
    """
    whole = module.get_parameter(key)
    part = part_on(whole.detach(), mesh, placements).clone(memory_format=torch.contiguous_format)
    split = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    module.register_parameter(key, parameter_like(split, whole))


@contextmanager
def computing_with(module: nn.Module, part: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, a module's own parameters are replaced by ``part(parameter)``."""
    whole = dict(module._parameters)
    for key, parameter in whole.items():
        if parameter is not None:
            module._parameters[key] = part(parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)


def local_parameters(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, a module's own parameters are plain tensors with this rank's parts; gradients go to the DTensors."""
    return computing_with(module, lambda whole: whole.to_local() if isinstance(whole, DTensor) else whole)


def shared(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity in the forward, all-reduce in the backward: for a replicated value used in a part of a computation.

    This function and :func:`summed` are each other's backward, so second-order gradients are correct too. DTensor's
    ``from_local`` and ``to_local`` have no second-order gradients (torch 2.13: ``_FromTorchTensor.backward``).
    """
    return _Shared.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in the forward, identity in the backward: every rank has the whole gradient of the sum."""
    return _Summed.apply(part, group)  # type: ignore[no-any-return, no-untyped-call]


def as_plain(tensor: DTensor) -> Tensor:
    """``to_local()``, which the user's code may change in place (``nn.ReLU(inplace=True)``, ``x += …``).

    The output of DTensor's function is a view, and torch refuses to change views made by an autograd function.
    """
    return _NotAView.apply(tensor.to_local())  # type: ignore[no-any-return, no-untyped-call]


class _NotAView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return part.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.detach()  # not a view, which the user's code couldn't change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.wait_tensor(collectives.all_reduce(part.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return shared(gradient, ctx.group), None
