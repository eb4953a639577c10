"""One rank's part of a checkpoint: which files it writes, and what of which tensors goes into each. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format import codec
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.saving.files import Piece
from lightning_shard.checkpoint.sharing import Shared, share
from lightning_shard.checkpoint.storable import check_storable
from lightning_shard.checkpoint.tensors import Frame, Located, common_mesh, flatten, identity, is_dtensor, locate
from lightning_shard.errors import UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PartFile:
    """One safetensors file of a rank; ``section`` is ``model``, ``optimizer``, ``trainer`` or ``rank``."""

    section: str
    path: str
    pieces: list[Piece]


@dataclass
class RankPart:
    """What one rank writes, and what it tells the others of it.

    Attributes:
        mesh_ranks: The ranks that hold the same tensors as this one.
        fingerprint: The number of tensors and a hash of their names, dtypes and shapes: those ranks must agree.
        aliases: By section, names of tensors that are the memory of another, to its name.
        state: The trainer state as typed JSON, on the rank that writes it.
    """

    attempt: str
    rank: int
    mesh_ranks: tuple[int, ...]
    fingerprint: tuple[int, str]
    files: list[PartFile] = field(default_factory=list)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    state: Any = None

    @property
    def state_path(self) -> str:
        return f"trainer/state-{self.attempt}.json"

    def paths(self) -> Iterator[str]:
        """Every file that this rank writes."""
        if self.state is not None:
            yield self.state_path
        for file in self.files:
            yield file.path


def plan_part(
    state: Mapping[str, Any] | torch.nn.Module,
    *,
    optimizer: Mapping[str, Any] | None,
    trainer_state: Any,
    rank_state: Mapping[str, Tensor] | None,
    mesh: DeviceMesh | None,
    ranks: Ranks,
    attempt: str,
) -> RankPart:
    """See :func:`lightning_shard.checkpoint.save` for the arguments.

    Raises:
        UnsupportedStateError: A value that the format can't hold; names its key.
        CheckpointError: The tensors' meshes don't fit the ranks that save.
    """
    sections = {"model": flatten(state), "optimizer": flatten(optimizer or {})}
    for tensors in sections.values():
        for name, tensor in tensors.items():
            _check_name(name)
            check_storable(name, tensor)
    frame = _frame({**sections["model"], **sections["optimizer"]}, mesh, ranks)
    part = RankPart(attempt, ranks.rank, frame.ranks if frame is not None else ranks.members, _fingerprint(sections))
    own = f"rank-{ranks.rank:05d}-{attempt}.safetensors"
    for section, tensors in sections.items():
        unique, aliases = _find_aliases(tensors)
        pieces = my_pieces([locate(name, tensor, frame) for name, tensor in sorted(unique.items())], ranks.rank)
        if pieces:
            part.files.append(PartFile(section, f"{section}/{own}", pieces))
        if aliases:
            part.aliases[section] = aliases
    if ranks.first and trainer_state is not None:
        part.state, tensors = codec.encode(trainer_state)
        if tensors:
            part.files.append(PartFile("trainer", f"trainer/state-{attempt}.safetensors", _whole(tensors)))
    if rank_state:
        part.files.append(PartFile("rank", f"trainer/{own}", _whole(flatten(rank_state))))
    return part


def _frame(state: Mapping[str, Tensor], mesh: DeviceMesh | None, ranks: Ranks) -> Frame | None:
    if ranks.members == (0,) and mesh is None and not any(is_dtensor(tensor) for tensor in state.values()):
        return None
    return Frame.of(mesh if mesh is not None else common_mesh(state, ranks.members), ranks.members, ranks.rank)


def _check_name(name: str) -> None:
    """safetensors keeps one name for itself, and its text is UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        fits = False
    else:
        fits = name != "__metadata__"
    if not fits:
        raise UnsupportedStateError(f"{name!r} can't be a tensor's name in a safetensors file: rename it.")


def _whole(tensors: Mapping[str, Tensor]) -> list[Piece]:
    for name, tensor in tensors.items():
        _check_name(name)
        check_storable(name, tensor)
        if is_dtensor(tensor):
            raise UnsupportedStateError(f"{name!r} is a DTensor: pass it in state= or optimizer=.")
    return [
        Piece(name, tuple(tensor.shape), Box.whole(tensor.shape), tensor.detach()) for name, tensor in tensors.items()
    ]


def _find_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name without those that are the very memory of another, and the names of these to its name."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = identity(tensor)
        if key is not None and key in seen:
            aliases[name] = seen[key]
        else:
            unique[name] = tensor
            if key is not None:
                seen[key] = name
    return unique, aliases


def my_pieces(located: list[Located], rank: int) -> list[Piece]:
    """What this rank writes: all that it alone holds, and its share of what others hold too."""
    pieces: list[Piece] = []
    by_holders: dict[tuple[int, ...], list[tuple[Located, int]]] = {}
    for tensor in located:
        for number in range(len(tensor.boxes)):
            by_holders.setdefault(tensor.holders, []).append((tensor, number))
    for holders, items in by_holders.items():
        shared = [Shared(tensor.boxes[number].box, tensor.local.element_size()) for tensor, number in items]
        parts = share(shared, len(holders), holders.index(rank))
        for (tensor, number), part in zip(items, parts, strict=True):
            if part is None:
                continue
            place = tensor.boxes[number]
            data = tensor.local
            for dim, (offset, size) in enumerate(zip(part.within(place.box).offsets, part.sizes)):
                if size != data.shape[dim]:
                    data = data.narrow(dim, place.local_offsets[dim] + offset, size)
            pieces.append(Piece(tensor.name, tensor.shape, part, data))
    return pieces


def _fingerprint(sections: Mapping[str, Mapping[str, Tensor]]) -> tuple[int, str]:
    """How many tensors this rank holds, and a hash of what they are: ranks of one mesh must agree."""
    lines = [
        f"{section}\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}"
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    ]
    return len(lines), digest("\n".join(sorted(lines)).encode(errors="surrogatepass"))
