"""Make layers that a tensor-parallel plan splits whole for a while, in place, with their code of before.

Zero or small initial weights are enlarged meanwhile: the last layer of a branch that begins at zero, a gate, or
LayerScale's 1e-6 would hide errors of everything that runs before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.parallel.fsdp.watched_parameters import others_in_place
from lightning_shard.parallel.tensor.local_modules import computing_with
from lightning_shard.sharding import full_tensor, local_part, local_tensor, parameter_like
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
def enlarged(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, trained parameters with only small elements hold random values. Collective over the tensor ranks.

    The values are written to the parameters' memory without autograd's knowledge: it may have saved the parameters in
    an earlier call.

    Args:
        parameters: Whole parameters, equal on all tensor ranks, or DTensors on the tensor axis. Parameters that are
            sharded over other axes, and all-gathered when a module is called, are left unchanged.
    """
    before: list[tuple[Tensor, Tensor]] = []
    try:
        for number, parameter in enumerate(parameters):
            if not parameter.requires_grad or not parameter.is_floating_point() or not _is_on_tensor_axis(parameter):
                continue
            whole = full_tensor(parameter)
            if whole.numel() and whole.abs().max() < _SMALL:
                memory = local_tensor(parameter).data
                before.append((memory, memory.clone()))
                memory.copy_(_part_of(_other_values(whole, number), parameter))
        yield
    finally:
        for memory, values in before:
            memory.copy_(values)


def _is_on_tensor_axis(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor) or parameter.device_mesh.mesh_dim_names == (TENSOR_AXIS,)


def _part_of(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    return local_part(whole, parameter) if isinstance(parameter, DTensor) else whole


def _other_values(whole: Tensor, seed: int) -> Tensor:
    """Random values, equal on all ranks: matrices keep the size of their inputs, vectors have no elements near 0."""
    generator = torch.Generator(whole.device).manual_seed(seed)
    values = torch.empty(whole.shape, dtype=torch.float32, device=whole.device)
    if whole.ndim > 1:
        return values.normal_(std=whole.size(-1) ** -0.5, generator=generator)
    return values.uniform_(0.25, 0.75, generator=generator)
