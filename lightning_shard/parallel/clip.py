"""Norms of gradients that are sharded over every axis (data shards, tensor parts, stages), and clipping by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.layout import DATA_AXIS, PARTS_OF_DATA_AXIS
from lightning_shard.sharding import local_tensor

_ELSEWHERE = "_lightning_shard_counted_elsewhere"
_PIECE = 1 << 15


def count_elsewhere(parameter: Tensor) -> None:
    """Exclude a parameter from norms on this rank: another stage holds it too, and counts it."""
    setattr(parameter, _ELSEWHERE, True)


def is_counted_elsewhere(parameter: Tensor) -> bool:
    return hasattr(parameter, _ELSEWHERE)


def counts_here(tensor: Tensor, stage_mesh: DeviceMesh) -> bool:
    """Whether this rank counts its local part of ``tensor`` in norms.

    Several ranks hold the same part where a placement is replicated, or the tensor's mesh lacks an axis of the stage.
    The first of them counts it, so that a sum over all ranks counts every element once.
    """
    coordinate = stage_mesh.get_coordinate()
    names = stage_mesh.mesh_dim_names
    assert coordinate is not None
    assert names is not None
    sharded: set[str] = set()
    if isinstance(tensor, DTensor):
        axes = tensor.device_mesh.mesh_dim_names
        assert axes is not None
        sharded = {axis for axis, placement in zip(axes, tensor.placements) if not placement.is_replicate()}
        if sharded.issuperset(PARTS_OF_DATA_AXIS):
            sharded.add(DATA_AXIS)
    return all(index == 0 for axis, index in zip(names, coordinate) if axis not in sharded)


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Tensor],
    stage_mesh: DeviceMesh,
    device: torch.device,
    norm_type: float = 2.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm of all gradients of the whole model, equal on all ranks. Collective over all ranks.

    Args:
        parameters: This rank's parameters; those without a gradient count as zero.
        stage_mesh: The mesh of the ranks that hold this rank's stage.
        device: Device of the result.
        norm_type: ``p`` of the p-norm; ``inf`` for the largest absolute value.
        dtype: The result's, the same on all ranks; ``None``: the widest of this rank's gradients, and at least float32.

    Returns:
        The norm, ``[]``.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and not is_counted_elsewhere(p)]
    return norm_over_ranks(gradients, stage_mesh, device, norm_type, dtype)


def norm_over_ranks(
    tensors: Iterable[Tensor],
    stage_mesh: DeviceMesh,
    device: torch.device,
    norm_type: float = 2.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The norm over all ranks' tensors together, each element counted once. Collective over all ranks."""
    own = list(tensors)
    norms = _own_norms(own, stage_mesh, device, norm_type)
    largest = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if len(norms):
        total = norms.max() if largest else norms.pow(norm_type).sum()
    if dist.is_initialized():
        dist.all_reduce(total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return (total if largest else total.pow(1.0 / norm_type)).to(dtype or type_of_norm(own))


def norms_over_stage(
    tensors: Sequence[Tensor], stage_mesh: DeviceMesh, device: torch.device, norm_type: float
) -> Tensor:
    """The norm of each tensor that a stage's ranks hold, ``[len(tensors)]``. Collective over the stage's ranks."""
    norms = _own_norms(tensors, stage_mesh, device, norm_type)
    largest = math.isinf(norm_type)
    total = norms if largest else norms.pow(norm_type)
    for axis in range(stage_mesh.ndim):
        dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=stage_mesh.get_group(axis))
    return (total if largest else total.pow(1.0 / norm_type)).to(type_of_norm(tensors))


def type_of_norm(tensors: Iterable[Tensor]) -> torch.dtype:
    """The widest real dtype of this rank's tensors, and at least float32."""
    return reduce(torch.promote_types, (tensor.dtype.to_real() for tensor in tensors), torch.float32)


def _own_norms(tensors: Sequence[Tensor], stage_mesh: DeviceMesh, device: torch.device, norm_type: float) -> Tensor:
    """The norm of the part of each tensor that this rank counts, ``[len(tensors)]`` in float64.

    Tensors of one device and dtype share one kernel launch. Norms of 16-bit tensors are computed in 32 bits: a result
    rounded to 16 bits would depend on how tensors are sharded. On the CPU, torch adds a tensor's elements one after
    another and so loses those that are small beside the sum; there, norms are computed piece by piece.
    """
    norms = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for place, tensor in enumerate(tensors):
        local = local_tensor(tensor)
        if local.numel() and counts_here(tensor, stage_mesh):
            pieces = local.reshape(-1).split(_PIECE) if local.device.type == "cpu" else (local,)
            by_kind.setdefault((local.device, local.dtype), []).extend((place, piece) for piece in pieces)
    largest = math.isinf(norm_type)
    for (_, dtype), alike in by_kind.items():
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else None
        of_pieces = torch._foreach_norm([piece for _, piece in alike], norm_type, dtype=wide)
        found = torch.stack(list(of_pieces)).to(device=device, dtype=torch.float64)
        places = torch.tensor([place for place, _ in alike]).to(device, non_blocking=True)
        powers = found if largest else found.pow(norm_type)
        norms.scatter_reduce_(0, places, powers, "amax" if largest else "sum")
    return norms if largest else norms.pow(1.0 / norm_type)


@torch.no_grad()
def scale_to_norm(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients, whose common norm is ``norm``, to ``max_norm`` if they exceed it."""
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for (place, dtype), alike in gradients_by_kind(parameters).items():
        torch._foreach_mul_(alike, scale.to(device=place, dtype=dtype))


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient to ``[-max_value, max_value]``."""
    for alike in gradients_by_kind(parameters).values():
        torch._foreach_clamp_min_(alike, -max_value)
        torch._foreach_clamp_max_(alike, max_value)


def gradients_by_kind(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Local parts of gradients by device and dtype, so that one kernel launch takes all of a kind."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return by_kind
