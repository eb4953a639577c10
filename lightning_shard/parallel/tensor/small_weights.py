"""Weights that begin as zeros, or as small numbers, and would hide what comes before them where results are compared.

So the last layer of a branch that begins as zeros, a gate, or LayerScale's 1e-6: what runs before has no effect yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.sharding import full_tensor, local_part, local_tensor

_SMALL = 0.01


@contextmanager
def enlarged(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, those that train and are small everywhere hold other numbers; a collective call over the tensor ranks.

    They are written to the parameters' memory, past autograd, which may have seen them in an earlier call.

    Args:
        parameters: Whole ones, the same on all tensor ranks, and DTensors. Those that are sharded over other axes, and
            gathered when a module inside is called, are left as they are.
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
    """The same on all ranks: of a matrix that keeps the size of what it is given, and of vectors none near zero."""
    generator = torch.Generator(whole.device).manual_seed(seed)
    values = torch.empty(whole.shape, dtype=torch.float32, device=whole.device)
    if whole.ndim > 1:
        return values.normal_(std=whole.size(-1) ** -0.5, generator=generator)
    return values.uniform_(0.25, 0.75, generator=generator)
