"""What a torch tensor or DTensor is to the plan: global shape, this rank's boxes of it, and who else holds them.

The only file of the checkpoint that knows DTensor's private parts, as of torch 2.11 to 2.13:

- ``DTensor._local_tensor``: ``to_local()`` would record a graph and wait on nothing we need.
- ``placement_types._StridedShard``: FSDP2 over a tensor that is sharded on the same dim already; not public.
- ``DeviceMesh._get_root_mesh``: finds the ranks that hold like tensors where the caller didn't name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.shards import (
    LocalBox,
    Runs,
    Split,
    local_boxes,
    local_shape,
    shard,
    shard_strided_last,
    strided_factors_fit,
)
from lightning_shard.errors import CheckpointError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Located:
    """A tensor of this rank's state, placed.

    ``boxes`` are the parts of the global tensor that ``local`` is made of; ``holders`` are the global ranks that hold
    the very same parts, this one included, in an order that they agree on.
    """

    name: str
    local: Tensor
    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    holders: tuple[int, ...]


class Frame:
    """The ranks that hold one list of tensors, such as those of a pipeline stage, as a box of ranks.

    A tensor that isn't a DTensor is held alike by all of them; a DTensor on some of the axes alike along the others.
    """

    def __init__(self, grid: Tensor, rank: int) -> None:
        self.grid = grid
        self.rank = rank
        self.ranks = tuple(int(r) for r in grid.flatten())
        if len(set(self.ranks)) != len(self.ranks) or rank not in self.ranks:
            raise CheckpointError(
                f"mesh holds the ranks {_short(self.ranks)}, and this is rank {rank}: pass the mesh of the ranks that"
                " hold the same tensors as this one."
            )
        self._coordinates = {
            int(r): tuple(index) for r, index in zip(self.ranks, itertools.product(*(range(n) for n in grid.shape)))
        }
        self._holders: dict[tuple[int, tuple[int, ...]], tuple[Tensor, tuple[int, ...]]] = {}

    @classmethod
    def of(cls, mesh: DeviceMesh | None, ranks: tuple[int, ...], rank: int) -> Frame:
        """From a mesh, or from all ranks that save where there is none."""
        if mesh is None:
            return cls(torch.tensor(ranks), rank)
        return cls(mesh.mesh.cpu(), rank)

    def holders(self, name: str, mesh_ranks: Tensor, shard_axes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold what this rank holds of a tensor that ``shard_axes`` of ``mesh_ranks`` shard."""
        key = (id(mesh_ranks), shard_axes)
        if key not in self._holders:
            # with the tensor, so that no other one gets its id
            self._holders[key] = mesh_ranks, self._find_holders(name, mesh_ranks, shard_axes)
        return self._holders[key][1]

    def _find_holders(self, name: str, mesh_ranks: Tensor, shard_axes: tuple[int, ...]) -> tuple[int, ...]:
        members = [int(r) for r in mesh_ranks.flatten()]
        outside = [r for r in members if r not in self._coordinates]
        if outside:
            raise CheckpointError(
                f"{name!r} is sharded over the ranks {_short(members)}, of which {_short(outside)} aren't among those"
                f" that save together ({_short(self.ranks)}): pass mesh=, the mesh of all ranks that hold this state."
            )
        coordinates = [self._coordinates[r] for r in members]
        spans = [sorted({c[axis] for c in coordinates}) for axis in range(self.grid.ndim)]
        free_axes = [axis for axis, span in enumerate(spans) if len(span) == 1]
        box = 1
        for span in spans:
            box *= len(span)
        if box != len(members) or any(len(spans[a]) not in (1, self.grid.shape[a]) for a in range(self.grid.ndim)):
            raise CheckpointError(
                f"{name!r} is sharded over the ranks {_short(members)}, which aren't whole axes of the mesh of ranks"
                f" that save together, {self.grid.tolist()}: pass mesh=, one whose axes include the tensor's."
            )
        (here,) = (mesh_ranks == self.rank).nonzero().tolist()
        index = tuple(here[axis] if axis in shard_axes else slice(None) for axis in range(mesh_ranks.ndim))
        found = set()
        for replica in mesh_ranks[index].flatten().tolist():
            place: list[int | slice] = list(self._coordinates[int(replica)])
            for axis in free_axes:
                place[axis] = slice(None)
            found.update(self.grid[tuple(place)].flatten().tolist())
        return tuple(sorted(int(r) for r in found))


def is_dtensor(value: Any) -> bool:
    # without a process group there are none, and importing them costs a second
    if not torch.distributed.is_available() or type(value) in (Tensor, torch.nn.Parameter):
        return False
    return isinstance(value, _dtensor_class())


@cache
def _dtensor_class() -> type:
    from torch.distributed.tensor import DTensor

    return DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor itself. Never with a graph."""
    value: Any = tensor
    return (value._local_tensor if is_dtensor(tensor) else tensor).detach()


def replicated_over(tensor: Tensor) -> Any:
    """The process group of the largest mesh axis along which a DTensor is replicated; None where there is none."""
    value: Any = tensor
    mesh = value.device_mesh
    if _place_in(mesh).coordinate is None:
        return None
    axes = [axis for axis, placement in enumerate(value.placements) if placement.is_replicate() and mesh.size(axis) > 1]
    if not axes:
        return None
    try:
        return mesh.get_group(max(axes, key=mesh.size))
    except RuntimeError:  # a mesh that was made without groups
        return None


def target_boxes(name: str, tensor: Tensor) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    """The global shape of a tensor, and this rank's boxes of it.

    Raises:
        UnsupportedStateError: A placement that isn't a part of the tensor (``Partial``).
        CheckpointError: The local tensor isn't of the shape that the placements say.
    """
    if not is_dtensor(tensor):
        return tuple(tensor.shape), (LocalBox(Box.whole(tensor.shape), (0,) * tensor.ndim),)
    value: Any = tensor
    shape = tuple(value.shape)
    place = _place_in(value.device_mesh)
    if place.coordinate is None:
        return shape, ()
    splits = _splits(name, value.placements, place.sizes, place.coordinate)
    boxes = _boxes(shape, splits, tuple(value._local_tensor.shape))
    if boxes is None:
        raise CheckpointError(
            f"{name!r} of shape {shape} with placements {value.placements} on {value.device_mesh} has a local tensor of"
            f" shape {tuple(value._local_tensor.shape)}, which isn't what these placements give"
            f" ({local_shape(shard(shape, splits))})."
        )
    return shape, boxes


def locate(name: str, tensor: Tensor, frame: Frame | None) -> Located:
    """Place one tensor of the state; ``frame`` None means that this process saves alone."""
    shape, boxes = target_boxes(name, tensor)
    local = local_tensor(tensor)
    if 0 in shape:
        # no rank's part has an element, and one rank must write the name all the same
        whole = LocalBox(Box.whole(shape), (0,) * len(shape))
        return Located(name, local.new_empty(shape), shape, (whole,), frame.ranks if frame is not None else (0,))
    if frame is None:
        if is_dtensor(tensor) and any(box.box.sizes != shape for box in boxes):
            raise CheckpointError(
                f"{name!r} is sharded over several ranks, and this process saves alone: save on all ranks."
            )
        return Located(name, local, shape, boxes, (0,))
    if not is_dtensor(tensor):
        return Located(name, local, shape, boxes, frame.ranks)
    value: Any = tensor
    place = _place_in(value.device_mesh)
    if place.coordinate is None:
        return Located(name, local, shape, (), (frame.rank,))
    axes = tuple(axis for axis, placement in enumerate(value.placements) if not placement.is_replicate())
    return Located(name, local, shape, boxes, frame.holders(name, place.ranks, axes))


def common_mesh(state: Mapping[str, Tensor], ranks: tuple[int, ...]) -> DeviceMesh | None:
    """The largest mesh that the DTensors of a state come from, if it is made of exactly ``ranks``."""
    for tensor in state.values():
        if is_dtensor(tensor):
            value: Any = tensor
            for mesh in (value.device_mesh._get_root_mesh(), value.device_mesh):
                if sorted(int(r) for r in mesh.mesh.flatten()) == sorted(ranks):
                    return mesh
    return None


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], splits: tuple[Split, ...], local: tuple[int, ...]) -> tuple[LocalBox, ...] | None:
    """This rank's boxes; None where no reading of the placements gives the local shape.

    A strided shard of uneven size has two readings: what FSDP2 does, and what DTensor's own redistribution does. The
    first comes first, as FSDP2 is who makes them; should the shapes fit it by chance, the commit finds the overlap.
    """
    readings: list[tuple[Runs, ...]] = []
    if any(split.split_factor > 1 for split in splits) and strided_factors_fit(splits):
        readings.append(shard_strided_last(shape, splits))
    readings.append(shard(shape, splits))
    for runs in readings:
        if local_shape(runs) == local:
            return tuple(local_boxes(runs))
    return None


def _splits(
    name: str, placements: tuple[Any, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Split, ...]:
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    splits = []
    for placement, parts, index in zip(placements, mesh_shape, coordinate):
        if placement.is_replicate():
            continue
        if isinstance(placement, _StridedShard):
            splits.append(Split(placement.dim, parts, index, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            splits.append(Split(placement.dim, parts, index))
        else:
            raise UnsupportedStateError(
                f"{name!r} has placement {placement}: its parts are summands, not pieces. Redistribute it to"
                " Replicate() or Shard() before saving or loading."
            )
    return tuple(splits)


@dataclass(frozen=True)
class _MeshPlace:
    """A mesh and this rank's coordinate in it, None if it isn't in it. Meshes reckon them anew whenever asked."""

    ranks: Tensor
    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None


# By identity: meshes of two process groups, one after the other, are equal where this process has another rank.
_places: dict[int, tuple[ref[DeviceMesh], _MeshPlace]] = {}


def _place_in(mesh: DeviceMesh) -> _MeshPlace:
    known = _places.get(id(mesh))
    if known is not None and known[0]() is mesh:
        return known[1]
    coordinate = mesh.get_coordinate()
    ranks = mesh.mesh.cpu()
    place = _MeshPlace(ranks, tuple(ranks.shape), None if coordinate is None else tuple(coordinate))
    _places[id(mesh)] = ref(mesh, partial(_forget, id(mesh))), place
    return place


def _forget(key: int, _: object) -> None:
    _places.pop(key, None)


def _short(ranks: Any) -> str:
    listed = list(ranks)
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, … {listed[-1]}] ({len(listed)})"


def flatten(state: Mapping[str, Any] | torch.nn.Module) -> dict[str, Tensor]:
    """Nested dicts of tensors to one dict, names joined by ``.``.

    Raises:
        UnsupportedStateError: A leaf that isn't a tensor, or two tensors of one name.
    """
    flat: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if name in flat:
                raise UnsupportedStateError(f"Two tensors are named {name!r} once nested dicts are joined by '.'.")
            flat[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        else:
            raise UnsupportedStateError(
                f"{name!r} is a {type(value).__name__}, not a tensor: state= and optimizer= hold tensors only; pass"
                " anything else in trainer_state=."
            )

    walk(state.state_dict() if isinstance(state, torch.nn.Module) else state, "")
    return flat


def identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory; None where there is none to tell by.

    A rank whose shard is empty can't tell that two DTensors are one, and needn't: it writes nothing of either.
    """
    local = local_tensor(tensor)
    if local.numel() == 0 or local.layout is not torch.strided or local.device.type == "meta":
        return None
    memory = (local.device, local.untyped_storage().data_ptr(), local.storage_offset())
    return (
        *memory,
        tuple(tensor.shape),
        tuple(local.shape),
        local.stride(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
    )
