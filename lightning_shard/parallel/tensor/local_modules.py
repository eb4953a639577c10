"""Let modules run their own code on this rank's part of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_shard.sharding import cut, parameter_like


def split_parameter(module: nn.Module, key: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Make a module's parameter a DTensor on a mesh, in place.

    Every rank holds the same full values, or is on meta, so each keeps its own part without communication.
    """
    whole = module.get_parameter(key)
    module.register_parameter(key, parameter_like(cut(whole, mesh, placements), whole))


@contextmanager
def computing_with(
    modules: Iterable[nn.Module], other: Callable[[Tensor], Tensor], *, buffers: bool = False
) -> Iterator[None]:
    """Inside, modules' own parameters, and buffers, are replaced by ``other(tensor)``."""
    slots: list[Any] = [own for m in modules for own in ([m._parameters, m._buffers] if buffers else [m._parameters])]
    before: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    try:
        for own in slots:  # not what stays: FSDP may exchange it inside, where a unit is gathered
            made = {key: other(tensor) for key, tensor in own.items() if tensor is not None}
            changed = [key for key, tensor in made.items() if tensor is not own[key]]
            before.append((own, {key: own[key] for key in changed}))
            own.update({key: made[key] for key in changed})
        yield
    finally:
        for own, held in before:
            own.update(held)


def local_parameters(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, a module's own parameters are plain tensors with this rank's parts; gradients go to the DTensors."""
    return computing_with([module], lambda whole: whole.to_local() if isinstance(whole, DTensor) else whole)


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
