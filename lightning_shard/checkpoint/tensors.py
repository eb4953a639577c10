"""What a torch tensor or DTensor is to the plan, told once: this rank's part of it, where that lies, who else holds it.

:func:`locate` is the door: behind it no function asks what a DTensor is. What follows from a layout and a shape alone
is reckoned once and kept for all tensors alike, a :class:`Spread`.

The only file of the checkpoint that knows DTensor's private parts, as of torch 2.11 to 2.13:

- ``DTensor._local_tensor``: ``to_local()`` would record a graph and wait on nothing we need.
- ``placement_types._StridedShard``: FSDP2 over a tensor that is sharded on the same dim already; not public.
- ``DeviceMesh._get_root_mesh``: finds the ranks that hold like tensors where the caller didn't name them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
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


@dataclass(frozen=True, eq=False, slots=True)
class Spread:
    """How a tensor lies over the ranks, as far as this rank needs to know: the same for all of one layout and shape.

    One object for all of them, so it is compared by identity.

    Attributes:
        shape: Of the global tensor.
        boxes: The parts of it that this rank's local tensor is made of. Of a tensor without elements, the whole.
        mesh: Over which it is spread, None for a plain tensor.
        placements: One for each of the mesh's axes.
    """

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    mesh: Place | None = None
    placements: tuple[Any, ...] = ()

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, placement in enumerate(self.placements) if not placement.is_replicate())


class Located(NamedTuple):
    """A tensor of this rank's state in its normal form; ``local`` shares its memory, and never has a graph."""

    name: str
    local: Tensor
    spread: Spread


class Frame:
    """The ranks that hold one list of tensors, such as those of a pipeline stage, as a box of ranks.

    A tensor that isn't a DTensor is held alike by all of them; a DTensor on some of the axes alike along the others.
    """

    def __init__(self, grid: Tensor, rank: int) -> None:
        self.grid = grid
        self.rank = rank
        members = grid.flatten().tolist()
        self.ranks: tuple[int, ...] = tuple(sorted(members))  # a mesh may have them in any order
        if len(set(self.ranks)) != len(self.ranks) or rank not in self.ranks:
            raise CheckpointError(
                f"mesh holds the ranks {_short(self.ranks)}, and this is rank {rank}: pass the mesh of the ranks that"
                " hold the same tensors as this one."
            )
        self._coordinates = {
            int(r): tuple(index) for r, index in zip(members, itertools.product(*(range(n) for n in grid.shape)))
        }
        self._holders: dict[tuple[int, tuple[int, ...]], tuple[Tensor, tuple[int, ...]]] = {}

    @classmethod
    def of(cls, mesh: Place | None, ranks: tuple[int, ...], rank: int) -> Frame:
        """From a mesh, or from all ranks that save where there is none. Of each there is one, which may be a key."""
        if mesh is None:
            return _frame_of_ranks(ranks, rank)
        if mesh.frame is None or mesh.frame.rank != rank:
            mesh.frame = cls(mesh.ranks, rank)
        return mesh.frame

    def holders_of(self, name: str, spread: Spread) -> tuple[int, ...]:
        """The ranks that hold the same parts of a tensor as this one, itself included, in an order they agree on.

        Raises:
            CheckpointError: It is spread over ranks that don't save, or over a part of the axes.
        """
        if spread.mesh is None or 0 in spread.shape:
            # a tensor without elements is in no rank's part, and one rank must write the name all the same
            return self.ranks
        if spread.mesh.coordinate is None:
            return (self.rank,)
        return self.holders(name, spread.mesh.ranks, spread.sharded_axes)

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


@lru_cache(maxsize=64)
def _frame_of_ranks(ranks: tuple[int, ...], rank: int) -> Frame:
    return Frame(torch.tensor(ranks), rank)


def is_dtensor(value: Any) -> bool:
    # where the module hasn't been imported there are none, and importing it costs a second
    if type(value) in (Tensor, torch.nn.Parameter):
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def locate(name: str, tensor: Tensor) -> Located:
    """The normal form of a tensor.

    Raises:
        UnsupportedStateError: A placement that isn't a part of the tensor (``Partial``).
        CheckpointError: The local tensor isn't of the shape that the placements say.
    """
    if is_dtensor(tensor):
        value: Any = tensor
        local: Tensor = value._local_tensor
        spread = _spread(name, value, tuple(local.shape))
    else:
        local = tensor
        spread = _plain(tuple(tensor.shape))
    if local.requires_grad or type(local) is not Tensor:
        local = local.detach()
    return Located(name, local, spread)


@lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...]) -> Spread:
    return Spread(shape, (LocalBox(Box.whole(shape), (0,) * len(shape)),))


def _spread(name: str, tensor: Any, local: tuple[int, ...]) -> Spread:
    place = place_of(tensor.device_mesh)
    key = tensor.placements, tuple(tensor.shape), local
    known = place.spreads.get(key)
    if known is None:
        known = place.spreads[key] = Spread(key[1], _boxes_of(name, place, *key), place, tuple(key[0]))
    return known


def _boxes_of(
    name: str, place: Place, placements: tuple[Any, ...], shape: tuple[int, ...], local: tuple[int, ...]
) -> tuple[LocalBox, ...]:
    if 0 in shape:
        return _plain(shape).boxes
    if place.coordinate is None:
        return ()
    splits = _splits(name, placements, place.sizes, place.coordinate)
    boxes = _boxes(shape, splits, local)
    if boxes is None:
        raise CheckpointError(
            f"{name!r} of shape {shape} with placements {placements} on {place.mesh()} has a local tensor of shape"
            f" {local}, which isn't what these placements give ({local_shape(shard(shape, splits))})."
        )
    return boxes


def common_mesh(tensors: Iterable[Located], ranks: tuple[int, ...]) -> Place | None:
    """The largest mesh that the DTensors of a state come from, if it is made of exactly ``ranks``."""
    meshes = {id(tensor.spread.mesh): tensor.spread.mesh for tensor in tensors}
    for place in meshes.values():
        mesh = place.mesh() if place is not None else None
        for candidate in (mesh._get_root_mesh(), mesh) if mesh is not None else ():
            if sorted(candidate.mesh.flatten().tolist()) == sorted(ranks):
                return place_of(candidate)
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


@dataclass(eq=False)
class Place:
    """A mesh and this rank's coordinate in it, None if it isn't in it, which meshes reckon anew whenever asked.

    With what is made once for all tensors on it: their spreads, and the frame where it is the mesh of all that save.
    """

    mesh: ref[DeviceMesh]
    ranks: Tensor
    coordinate: tuple[int, ...] | None
    spreads: dict[Any, Spread] = field(default_factory=dict)
    frame: Frame | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)

    def replicated_over(self, placements: tuple[Any, ...]) -> Any:
        """The process group of the largest axis along which a tensor is replicated; None where there is none."""
        mesh = self.mesh()
        if self.coordinate is None or mesh is None:
            return None
        sizes = self.sizes
        axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate() and sizes[axis] > 1]
        if not axes:
            return None
        try:
            return mesh.get_group(max(axes, key=sizes.__getitem__))
        except RuntimeError:  # a mesh that was made without groups
            return None


# By identity: meshes of two process groups, one after the other, are equal where this process has another rank.
_places: dict[int, Place] = {}


def place_of(mesh: DeviceMesh) -> Place:
    """The same object for a mesh whenever asked."""
    known = _places.get(id(mesh))
    if known is not None and known.mesh() is mesh:
        return known
    coordinate = mesh.get_coordinate()
    place = Place(
        ref(mesh, partial(_forget, id(mesh))), mesh.mesh.cpu(), None if coordinate is None else tuple(coordinate)
    )
    _places[id(mesh)] = place
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


def identity(tensor: Located) -> Any:
    """Equal for tensors that are the same memory; None where there is none to tell by.

    A rank whose shard is empty can't tell that two DTensors are one, and needn't: it writes nothing of either.
    """
    local = tensor.local
    if local.numel() == 0 or local.layout is not torch.strided or local.device.type == "meta":
        return None
    memory = (local.device, local.untyped_storage().data_ptr(), local.storage_offset())
    return (*memory, tensor.spread.shape, local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg())
