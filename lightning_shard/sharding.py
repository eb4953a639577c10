"""The local part of a tensor under DTensor placements, in plain arithmetic on views."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(full: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``full``, as ``like`` is sharded; a view, no communication.

    Shards are cut as ``torch.chunk`` cuts, the last mesh axis first: fully sharded data parallelism (an earlier axis)
    splits what tensor parallelism (a later axis) left.

    Args:
        full: The whole tensor, of ``like``'s global shape.
        like: A DTensor with replicated and sharded placements.
    """
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank isn't in the tensor's mesh"
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        assert not placement.is_partial(), f"{placement} has no local part of a full tensor"
        # torch's own strided shards (fully sharded over tensor parallel on one dim) aren't a Shard, but have its dim.
        dim = getattr(placement, "dim", None)
        if dim is not None:
            full = chunk(full, dim, like.device_mesh.size(axis), coordinate[axis])
    return full


def chunk(tensor: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """``torch.chunk(tensor, parts, dim)[index]``, with an empty part where the tensor has fewer rows than parts."""
    size = -(-tensor.size(dim) // parts)
    start = min(index * size, tensor.size(dim))
    return tensor.narrow(dim, start, min(size, tensor.size(dim) - start))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a DTensor (collective over its mesh), or the tensor itself; without gradient history."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    on_mesh = tensor.to(tensor.device_mesh.device_type)  # it may be offloaded
    assert isinstance(on_mesh, DTensor)
    return on_mesh.full_tensor()


def local_tensor(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, or the tensor itself; shares memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
