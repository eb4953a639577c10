"""Normal form of tensors and DTensors: the local tensor, the boxes of the global tensor in it, and its replicas' ranks.

:func:`locate` converts to this form; code after it never asks whether a tensor is a DTensor. What follows from layout
and shape alone (:class:`Spread`) is computed once and cached for all tensors that share them.

The only file of ``checkpoint/`` that knows private parts of DTensor, as of torch 2.11 to 2.14:

- ``DTensor._local_tensor``: ``to_local()`` would record a graph and wait on nothing we need.
- ``placement_types._StridedShard``: FSDP2 over a tensor that is already sharded on the same dim; not public.
- ``DeviceMesh._get_root_mesh``: finds the ranks that hold the same list of tensors where the caller passed no mesh.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.header import dtype_name
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
    """How a tensor is laid out over the ranks, as far as this rank needs to know.

    All tensors of one layout and shape share one object, so it is compared by identity.

    Attributes:
        shape: The global shape.
        boxes: The boxes of the global tensor that the local tensor consists of. The whole, for a tensor without
            elements.
        mesh: The mesh of a DTensor; None for a plain tensor.
        placements: One for each mesh axis.
    """

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    mesh: KnownMesh | None = None
    placements: tuple[Any, ...] = ()


class Located(NamedTuple):
    """A tensor of this rank's state in normal form; ``local`` shares its memory and is detached from autograd."""

    name: str
    local: Tensor
    spread: Spread


class Frame:
    """The grid of ranks that hold the same list of tensors, such as the ranks of one pipeline stage.

    A plain tensor is replicated on all of them. A DTensor over some of the grid's axes is replicated along the others.
    """

    def __init__(self, grid: Tensor, rank: int) -> None:
        self.grid = grid
        self.rank = rank
        members = grid.flatten().tolist()
        self.ranks: tuple[int, ...] = tuple(sorted(members))  # a mesh may have them in any order
        if len(set(self.ranks)) != len(self.ranks) or rank not in self.ranks:
            raise CheckpointError(
                f"mesh holds the ranks {short(self.ranks)}, and this is rank {rank}: pass the mesh of the ranks that"
                " hold the same tensors as this one."
            )
        self._coordinates = {
            int(r): tuple(index) for r, index in zip(members, itertools.product(*(range(n) for n in grid.shape)))
        }
        self._holders: dict[tuple[int, tuple[int, ...]], tuple[Tensor, tuple[int, ...]]] = {}

    @classmethod
    def of(cls, mesh: KnownMesh | None, ranks: tuple[int, ...], rank: int) -> Frame:
        """The frame of a mesh, or of all ranks that save if there is none. Cached per mesh, so it can be a key."""
        if mesh is None:
            return _frame_of_ranks(ranks, rank)
        if mesh.frame is None or mesh.frame.rank != rank:
            mesh.frame = cls(mesh.ranks, rank)
        return mesh.frame

    def holders_of(self, name: str, spread: Spread) -> tuple[int, ...]:
        """The ranks that hold the same part of a tensor as this rank, itself included, in the same order on each.

        Raises:
            CheckpointError: The tensor's mesh has ranks that don't save, or isn't made of whole axes of the grid.
        """
        if spread.mesh is None or 0 in spread.shape:
            # no rank's part has elements of such a tensor, but one rank must write its name all the same
            return self.ranks
        if spread.mesh.coordinate is None:
            return (self.rank,)
        axes = tuple(axis for axis, placement in enumerate(spread.placements) if not placement.is_replicate())
        return self.holders(name, spread.mesh.ranks, axes)

    def holders(self, name: str, mesh_ranks: Tensor, shard_axes: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold the same part as this rank of a tensor sharded over ``shard_axes`` of ``mesh_ranks``."""
        key = (id(mesh_ranks), shard_axes)
        if key not in self._holders:
            # the value keeps mesh_ranks alive, so that no other tensor gets its id
            self._holders[key] = mesh_ranks, self._find_holders(name, mesh_ranks, shard_axes)
        return self._holders[key][1]

    def _find_holders(self, name: str, mesh_ranks: Tensor, shard_axes: tuple[int, ...]) -> tuple[int, ...]:
        members = [int(r) for r in mesh_ranks.flatten()]
        outside = [r for r in members if r not in self._coordinates]
        if outside:
            raise CheckpointError(
                f"{name!r} is sharded over the ranks {short(members)}, of which {short(outside)} aren't among those"
                f" that save together ({short(self.ranks)}): pass mesh=, the mesh of all ranks that hold this state."
            )
        coordinates = [self._coordinates[r] for r in members]
        spans = [sorted({c[axis] for c in coordinates}) for axis in range(self.grid.ndim)]
        free_axes = [axis for axis, span in enumerate(spans) if len(span) == 1]
        are_whole = (len(span) in (1, size) for span, size in zip(spans, self.grid.shape))
        if math.prod(map(len, spans)) != len(members) or not all(are_whole):
            raise CheckpointError(
                f"{name!r} is sharded over the ranks {short(members)}, which aren't complete axes of the mesh of"
                f" saving ranks, {self.grid.tolist()}: pass mesh=, a mesh whose axes include those of the tensor's"
                " mesh."
            )
        (here,) = (mesh_ranks == self.rank).nonzero().tolist()
        index = tuple(here[axis] if axis in shard_axes else slice(None) for axis in range(mesh_ranks.ndim))
        found = set()
        for replica in mesh_ranks[index].flatten().tolist():
            coordinates_of_it = enumerate(self._coordinates[int(replica)])
            place = tuple(slice(None) if axis in free_axes else at for axis, at in coordinates_of_it)
            found.update(self.grid[place].flatten().tolist())
        return tuple(sorted(int(r) for r in found))


@lru_cache(maxsize=64)
def _frame_of_ranks(ranks: tuple[int, ...], rank: int) -> Frame:
    return Frame(torch.tensor(ranks), rank)


def is_dtensor(value: Any) -> bool:
    # if the module isn't imported no DTensor exists, and importing it takes a second
    if type(value) in (Tensor, torch.nn.Parameter):
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def locate(name: str, tensor: Tensor, *, to_save: bool = False) -> Located:
    """Convert a tensor or DTensor to normal form.

    Args:
        to_save: Check that its elements can be saved (:func:`check_storable`).

    Raises:
        UnsupportedStateError: A placement under which ranks hold no part of the tensor (``Partial``).
        CheckpointError: The local tensor doesn't have the shape that the placements imply.
    """
    local = _local_of(tensor)
    if to_save:
        check_storable(name, local)
    spread = _plain(tuple(local.shape)) if local is tensor else _spread(name, tensor, tuple(local.shape))
    if local.requires_grad or type(local) is not Tensor:
        local = local.detach()
    return Located(name, local, spread)


@lru_cache(maxsize=4096)
def _plain(shape: tuple[int, ...]) -> Spread:
    return Spread(shape, (LocalBox(Box.whole(shape), (0,) * len(shape)),))


def _spread(name: str, tensor: Any, local: tuple[int, ...]) -> Spread:
    mesh = known_mesh(tensor.device_mesh)
    key = tensor.placements, tuple(tensor.shape), local
    if (known := mesh.spreads.get(key)) is not None:
        return known
    placements, shape, _ = key
    boxes: tuple[LocalBox, ...] = ()
    if 0 in shape:
        boxes = _plain(shape).boxes
    elif mesh.coordinate is not None:
        splits = _splits(name, placements, mesh.sizes, mesh.coordinate)
        found = _boxes(shape, splits, local)
        if found is None:
            raise CheckpointError(
                f"{name!r} of shape {shape} with placements {placements} on {mesh.mesh()} has a local tensor of shape"
                f" {local}, which isn't what these placements give ({local_shape(shard(shape, splits))})."
            )
        boxes = found
    mesh.spreads[key] = Spread(shape, boxes, mesh, tuple(placements))
    return mesh.spreads[key]


def common_mesh(tensors: Iterable[Located], ranks: tuple[int, ...]) -> KnownMesh | None:
    """A mesh of exactly ``ranks`` among the DTensors' root meshes and meshes; None if there is none."""
    meshes = {id(tensor.spread.mesh): tensor.spread.mesh for tensor in tensors}
    for known in meshes.values():
        mesh = known.mesh() if known is not None else None
        for candidate in (mesh._get_root_mesh(), mesh) if mesh is not None else ():
            if sorted(candidate.mesh.flatten().tolist()) == sorted(ranks):
                return known_mesh(candidate)
    return None


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], splits: tuple[Split, ...], local: tuple[int, ...]) -> tuple[LocalBox, ...] | None:
    """This rank's boxes; None if no interpretation of the placements gives the local shape.

    A strided shard of uneven size has two interpretations: how FSDP2 shards, and how DTensor's own redistribution does.
    FSDP2's is tried first, since FSDP2 makes most of them. If the shape fits it only by chance, the commit's coverage
    check finds the overlap.
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
                f"{name!r} has placement {placement}: ranks hold summands of it, not shards. Redistribute it to"
                " Replicate() or Shard() before saving or loading."
            )
    return tuple(splits)


@dataclass(eq=False)
class KnownMesh:
    """Per-mesh cache: this rank's coordinate (None if it isn't in the mesh), which DeviceMesh computes on each call.

    It also keeps what is computed once for all tensors on the mesh: their spreads, and the frame if it is the mesh of
    all ranks that hold the same list of tensors.
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
        """The process group of the largest mesh axis that replicates a tensor; None if there is none."""
        mesh = self.mesh()
        if self.coordinate is None or mesh is None:
            return None
        sizes = self.sizes
        axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate() and sizes[axis] > 1]
        if not axes:
            return None
        try:
            return mesh.get_group(max(axes, key=sizes.__getitem__))
        except RuntimeError:  # a mesh without process groups
            return None


# Keyed by identity: after a new init_process_group an equal mesh may give this process another rank.
_known: dict[int, KnownMesh] = {}


def known_mesh(mesh: DeviceMesh) -> KnownMesh:
    """The cached :class:`KnownMesh` of a mesh: always the same object for the same mesh."""
    known = _known.get(id(mesh))
    if known is not None and known.mesh() is mesh:
        return known
    coordinate = mesh.get_coordinate()
    known = KnownMesh(
        ref(mesh, partial(_forget, id(mesh))), mesh.mesh.cpu(), None if coordinate is None else tuple(coordinate)
    )
    _known[id(mesh)] = known
    return known


def _forget(key: int, _: object, meshes: dict[int, KnownMesh] = _known) -> None:
    # bound as a default, since at exit a module's names are gone before the last meshes are
    meshes.pop(key, None)


_storable: set[tuple[Any, ...]] = set()
"""Kinds of tensors that passed. ``is_quantized`` isn't part of the kind: quantized tensors have their own dtypes."""


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedStateError for a tensor without bytes to write, or whose layout or dtype the format lacks."""
    tensor = _local_of(tensor)
    known = type(tensor), tensor.dtype, tensor.layout, tensor.is_nested, tensor.is_meta
    if known in _storable:
        return
    what = None
    if is_lazy(tensor):
        what = "not initialized yet, as in a lazy module: run the module once before saving"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # type: ignore[comparison-overlap]
        kind = type(tensor)
        parts = ", ".join(tensor.__tensor_flatten__()[0]) if hasattr(tensor, "__tensor_flatten__") else ""
        what = (
            f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass whose values aren't stored as plain elements:"
            f" save its inner tensors{parts and f' ({parts})'}, or a plain tensor of its values, as in trainer_state a"
            f" codec does: checkpoint.register_codec({kind.__qualname__}, encode, decode)"
        )
    elif tensor.is_quantized:
        what = "a quantized tensor: save its int_repr() and its scales"
    elif tensor.is_nested:
        what = "a nested tensor: save its values and lengths"
    elif tensor.layout is not torch.strided:
        what = f"a tensor of layout {tensor.layout}: save its indices and values, or a plain tensor, by to_dense()"
    elif tensor.device.type == "meta":
        what = "on the meta device and has no data: materialize it before saving"
    if what is not None:
        raise UnsupportedStateError(f"{name!r} is {what}.")
    dtype_name(tensor.dtype, name)
    _storable.add(known)


def short(ranks: Any) -> str:
    """A list of ranks for an error."""
    listed = list(ranks)
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, … {listed[-1]}] ({len(listed)})"


def flatten(state: Mapping[str, Any] | torch.nn.Module) -> dict[str, Tensor]:
    """Flatten nested dicts of tensors (or a module's state dict) to one dict, keys joined by ``.``."""
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
                f"{repr(name) if name else 'The state'} is a {type(value).__name__}, not a tensor: state= and"
                " optimizer= hold tensors only; pass anything else in trainer_state=."
            )

    walk(state.state_dict() if isinstance(state, torch.nn.Module) else state, "")
    return flat


def identity(tensor: Located) -> Any:
    """A key that is equal for tensors that are the same memory; None for a tensor without memory to compare.

    A rank with an empty shard can't tell whether two DTensors share memory, and needn't: it writes nothing of either.
    """
    local = tensor.local
    if local.numel() == 0 or local.layout is not torch.strided or local.device.type == "meta":
        return None
    memory = (local.device, local.untyped_storage().data_ptr(), local.storage_offset())
    return (*memory, tensor.spread.shape, local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg())
