"""Make layers that a tensor-parallel plan splits whole for a while, in place, with their code of before.

Zero or small initial weights are enlarged meanwhile: the last layer of a branch that begins at zero, a gate, or
LayerScale's 1e-6 would hide errors of everything that runs before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.parallel.fsdp.watched_parameters import others_in_place
from lightning_shard.parallel.tensor.local_modules import computing_with
from lightning_shard.sharding import cut, full_tensor, parameter_like
from lightning_shard.torch_private import replaced

Forward = Callable[..., Any]
Layers = Mapping[str, tuple[nn.Module, Forward | None]]
"""Split layers by name, each with the forward that it had as an attribute before it was split."""


def whole_parameters(layers: Layers) -> dict[int, nn.Parameter]:
    """By the ids of split ones, since tied ones are one. Collective over the tensor ranks."""
    found = {id(p): p for layer, _ in layers.values() for p in layer.parameters() if isinstance(p, DTensor)}
    return {number: parameter_like(full_tensor(p), p) for number, p in found.items()}


@contextmanager
def with_whole_layers(layers: Layers, parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, split layers have their whole parameters and original forwards, and no hooks."""
    with others_in_place(), ExitStack() as inside:
        for layer, forward in layers.values():
            plain = MethodType(type(layer).forward, layer) if forward is None else forward
            exchanged = [("forward", plain), ("_forward_hooks", OrderedDict()), ("_forward_pre_hooks", OrderedDict())]
            inside.enter_context(replaced(*((layer, name, value) for name, value in exchanged)))
            inside.enter_context(computing_with(layer.modules(), lambda p: parameters.get(id(p), p)))
        yield


_SMALL = 0.01


@contextmanager
def enlarged(module: nn.Module) -> Iterator[None]:
    """Inside, others with random values are in place of a module's trained parameters with only small elements.

    Collective over the tensor ranks. The parameters are whole ones, equal on all of these ranks, or DTensors on the
    tensor axis. Those that are sharded over other axes, and all-gathered when a module is called, stay in place.
    """
    made: dict[int, Tensor] = {}

    def other(parameter: Tensor) -> Tensor:
        if id(parameter) not in made:
            whole = full_tensor(parameter) if _may_be_other(parameter) else torch.empty(0)
            is_small = whole.numel() and whole.abs().max() < _SMALL
            made[id(parameter)] = _other(whole, parameter, len(made)) if is_small else parameter
        return made[id(parameter)]

    with others_in_place(), computing_with(module.modules(), other):
        yield


def _may_be_other(parameter: Tensor) -> bool:
    is_whole = not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == (TENSOR_AXIS,)
    return is_whole and parameter.requires_grad and parameter.is_floating_point()


def _other(whole: Tensor, parameter: Tensor, seed: int) -> nn.Parameter:
    """Random values, equal on all ranks: matrices keep the size of their inputs, vectors have no elements near 0."""
    generator = torch.Generator(whole.device).manual_seed(seed)
    values = torch.empty(whole.shape, dtype=torch.float32, device=whole.device)
    if whole.ndim > 1:
        values.normal_(std=whole.size(-1) ** -0.5, generator=generator)
    else:
        values.uniform_(0.25, 0.75, generator=generator)
    values = values.to(whole.dtype)
    if isinstance(parameter, DTensor):
        values = cut(values, parameter.device_mesh, parameter.placements)
    return parameter_like(values, parameter)
