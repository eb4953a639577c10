"""Local and full tensors under DTensor placements; a rank's local part is computed by arithmetic on views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``full``, sharded as ``like`` is; no communication.

    Args:
        full: The full tensor, of ``like``'s global shape.
        like: A DTensor with replicated and sharded placements only.
    """
    return part_on(full, like.device_mesh, like.placements)


def part_on(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of ``full`` under placements on a mesh: a view, or a copy if it consists of several pieces.

    Shards are cut as by ``torch.chunk``, the last mesh axis first: fully sharded data parallelism (an earlier axis)
    shards what tensor parallelism (a later axis) has already sharded. torch writes this as a strided shard whose
    ``split_factor`` is the number of parts that the later axes made of the dim. With any other factor, the dim is that
    many tensors packed one after the other, and each of them is sharded by itself.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank isn't in the tensor's mesh"
    parts_of: dict[int, int] = {}
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        assert not placement.is_partial(), f"{placement} has no local part of a full tensor"
        # torch's strided shard isn't a subclass of Shard, but has a dim too
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        packed = getattr(placement, "split_factor", 1)
        if packed in (1, parts_of.get(dim, 1)):
            full = chunk(full, dim, mesh.size(axis), coordinate[axis])
        else:
            pieces = full.chunk(packed, dim)
            full = torch.cat([chunk(piece, dim, mesh.size(axis), coordinate[axis]) for piece in pieces], dim)
        parts_of[dim] = parts_of.get(dim, 1) * mesh.size(axis)
    return full


def cut(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A full tensor, which every rank has alike or on meta, as a DTensor: each keeps a copy of its part."""
    local = part_on(full.detach(), mesh, placements).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def laid_out(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with this local part, of the size and the layout of another."""
    size: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)


def chunk(tensor: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """``torch.chunk(tensor, parts, dim)[index]``; an empty part where torch returns fewer chunks than ``parts``."""
    size = -(-tensor.size(dim) // parts)
    start = min(index * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (collective over its mesh), or the tensor itself; detached from the graph."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # the shard may be offloaded to the host
    assert isinstance(on_mesh, DTensor)
    try:
        return on_mesh.full_tensor()
    except ValueError:
        # torch 2.11 takes every strided shard for FSDP2's over a tensor-parallel one, and can't gather packed tensors
        if torch.__version__ >= "2.12":
            raise
        return _summed_parts(on_mesh)


def _summed_parts(tensor: DTensor) -> Tensor:
    """The full tensor as an all-reduced sum: each rank writes its local part into zeros."""
    local = tensor.to_local()
    numbers = torch.arange(tensor.numel(), device=local.device).view(tensor.shape)
    full = torch.zeros(tensor.numel(), dtype=local.dtype, device=local.device)
    full[local_part(numbers, tensor).flatten()] = local.flatten()
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(full, group=tensor.device_mesh.get_group(axis))
    return full.view(tensor.shape)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or the tensor itself; detached, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameter_like(tensor: Tensor, like: Tensor) -> nn.Parameter:
    """A parameter that replaces another: with what is set on that one, ``requires_grad`` included."""
    made = nn.Parameter(tensor, like.requires_grad)
    put_attributes(made, like.__dict__)
    return made


def put_attributes(tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    """Set those that a tensor doesn't have yet."""
    for name, value in attributes.items():
        tensor.__dict__.setdefault(name, value)


def share_attributes(tensor: Tensor, other: Tensor) -> None:
    """Have two tensors that stand for one parameter share what is set on either, now or later."""
    tensor.__dict__ = other.__dict__
