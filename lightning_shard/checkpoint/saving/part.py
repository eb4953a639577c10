"""Plans one rank's part of a checkpoint: which files it writes, and which boxes of which tensors go into each. No I/O.

The part of the plan that depends only on names, dtypes, layouts and aliases is the same from save to save, so it is
computed once and cached (:func:`_plan`). A later save locates its tensors, finds which of them alias each other, and
takes views.

Each rank of a mesh writes a part of a replicated tensor, so fingerprints check that it is equal on all of them: of all
elements of a small tensor, and a sample of a larger one, which costs a save no time. Replicas that have diverged differ
nearly everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from lightning_shard.checkpoint import half_loaded
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.engine import collection_paused
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.header import check_name
from lightning_shard.checkpoint.format.typed_json import encode
from lightning_shard.checkpoint.memory import byte_view, narrow, resolved, settle
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.saving.accounts import Account
from lightning_shard.checkpoint.saving.files import FilePlan, Piece, arranged, plan_file
from lightning_shard.checkpoint.shards import LocalBox, Shared, share
from lightning_shard.checkpoint.tensors import (
    Frame,
    Located,
    Spread,
    check_storable,
    common_mesh,
    flatten,
    identity,
    is_dtensor,
    known_mesh,
    locate,
)
from lightning_shard.errors import CheckpointError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WHOLE_BYTES = 2**14
"""Tensors up to this size are compared whole."""
WINDOWS, WINDOW_BYTES = 16, 2**10
"""The sample of a larger tensor: so many windows, evenly spaced from its first element on."""
FINGERPRINT_BYTES = 8


def fingerprints(tensors: Sequence[Tensor]) -> bytes:
    """The fingerprints of tensors, concatenated, :data:`FINGERPRINT_BYTES` each. One copy from each device."""
    samples = [_sample(tensor) for tensor in tensors]
    found = [b""] * len(samples)
    for device in {sample.device for sample in samples}:
        numbers = [number for number, sample in enumerate(samples) if sample.device == device]
        own = [samples[number] for number in numbers]
        if device.type != "cpu":
            own = list(torch.cat(own).cpu().split([len(sample) for sample in own]))
        for number, sample in zip(numbers, own):
            found[number] = xxhash.xxh3_64_digest(byte_view(sample))
    return b"".join(found)


def _sample(tensor: Tensor) -> Tensor:
    """The bytes that are compared of a tensor."""
    tensor = resolved(tensor)
    if tensor.nbytes <= WHOLE_BYTES:
        return tensor.contiguous().view(-1).view(torch.uint8)
    each = WINDOW_BYTES // tensor.element_size()
    step = (tensor.numel() - each) // (WINDOWS - 1)
    if tensor.is_contiguous():
        chosen = tensor.as_strided((WINDOWS, each), (step, 1))
    else:
        places = torch.arange(WINDOWS, device=tensor.device)[:, None] * step + torch.arange(each, device=tensor.device)
        chosen = tensor[torch.unravel_index(places, tensor.shape)]
    return chosen.reshape(-1).view(torch.uint8)


KEPT_PLANS = 8
"""Size of the plan cache: the states that a process saves in turn (a model with its optimizer, an average of it)."""


@dataclass(frozen=True)
class PartFile:
    """One safetensors file of a rank; ``section`` is ``model``, ``optimizer``, ``trainer`` or ``rank``."""

    section: str
    path: str
    plan: FilePlan
    data: list[Tensor]
    """The elements of the plan's pieces, in the plan's order."""

    def pieces(self) -> list[tuple[Piece, Tensor]]:
        return list(zip(self.plan.pieces, self.data, strict=True))


@dataclass
class RankPart:
    """What one rank writes.

    Attributes:
        account: What the ranks compare; the files are added to it when they are written.
        state: The trainer state as typed JSON, on the rank that writes it; None elsewhere.
    """

    attempt: str
    account: Account
    files: list[PartFile] = field(default_factory=list)
    state: Any = None

    @property
    def state_path(self) -> str:
        return f"trainer/state-{self.attempt}.json"

    def paths(self) -> Iterator[str]:
        """The paths of all files that this rank writes."""
        if self.state is not None:
            yield self.state_path
        for file in self.files:
            yield file.path


@collection_paused()
def plan_part(
    state: Mapping[str, Any] | torch.nn.Module,
    optimizer: Mapping[str, Any] | None = None,
    trainer_state: Any = None,
    rank_state: Mapping[str, Tensor] | None = None,
    *,
    mesh: DeviceMesh | None,
    ranks: Ranks,
    attempt: str,
    may_be_half_loaded: bool = False,
) -> RankPart:
    """Plan this rank's part. See :func:`lightning_shard.checkpoint.save` for the other arguments.

    Args:
        may_be_half_loaded: Accept tensors that a failed load has overwritten in part: for reading, not for saving.
    """
    if mesh is not None and not hasattr(mesh, "get_coordinate"):
        raise CheckpointError(f"mesh ({mesh!r:.80}) must be a DeviceMesh, or None.")
    flat = {"model": flatten(state), "optimizer": flatten(optimizer or {})}
    sections = {
        section: [locate(name, tensor, to_save=True) for name, tensor in tensors.items()]
        for section, tensors in flat.items()
    }
    everything = [tensor for tensors in sections.values() for tensor in tensors]
    settle([tensor.local for tensor in everything])
    if not may_be_half_loaded:
        half_loaded.refuse(everything)
    frame = Frame.of(
        known_mesh(mesh) if mesh is not None else common_mesh(everything, ranks.members), ranks.members, ranks.rank
    )
    aliases = {section: _find_aliases(tensors) for section, tensors in sections.items()}
    outline = tuple(
        (section, outlined(tensors), tuple(aliases[section].items())) for section, tensors in sections.items()
    )
    plan = _plan(frame, outline)
    contents = fingerprints([sections[section][number].local for section, number in plan.shared])
    told = {"fingerprint": plan.fingerprint, "replicated": plan.replicated, "contents": contents}
    part = RankPart(attempt, Account.of_rank(ranks.rank, frame.ranks, aliases, **told))
    own = f"rank-{ranks.rank:05d}-{attempt}.safetensors"
    for section, (cuts, file) in plan.files.items():
        data = [cut.of(sections[section][cut.number]) for cut in cuts]
        part.files.append(PartFile(section, f"{section}/{own}", file, data))
    if ranks.first and trainer_state is not None:
        part.state, tensors = encode(trainer_state)
        if tensors:
            part.files.append(_whole("trainer", f"trainer/state-{attempt}.safetensors", tensors))
    if rank_state:
        part.files.append(_whole("rank", f"trainer/{own}", flatten(rank_state)))
    return part


def _whole(section: str, path: str, tensors: Mapping[str, Tensor]) -> PartFile:
    """Plan a file of whole tensors that only this rank has."""
    for name, tensor in tensors.items():
        check_name(name)
        check_storable(name, tensor)
        if is_dtensor(tensor):
            raise UnsupportedStateError(f"{name!r} is a DTensor: pass it in state= or optimizer=.")
    settle(tensors.values())
    pieces = [
        (Piece(name, tensor.dtype, tuple(tensor.shape), Box.whole(tensor.shape)), tensor.detach())
        for name, tensor in tensors.items()
    ]
    return PartFile(section, path, *arranged(pieces))


def _find_aliases(tensors: Iterable[Located]) -> dict[str, str]:
    """Map each tensor that shares its memory with an earlier one to that one's name."""
    aliases: dict[str, str] = {}
    first_at: dict[int, list[Located]] = {}
    for tensor in tensors:
        known = first_at.setdefault(tensor.local.data_ptr(), [])
        # seldom more than one; tensors that begin at one address are distinguished by shape, strides and so on
        if known and (key := identity(tensor)) is not None:
            first = next((other.name for other in known if identity(other) == key), None)
            if first is not None:
                aliases[tensor.name] = first
                continue
        known.append(tensor)
    return aliases


# -- the cached plan: what is the same from save to save ---------------------------------------------------------------


class Outlined(NamedTuple):
    """The properties of a tensor that the cached plan depends on."""

    name: str
    dtype: torch.dtype
    spread: Spread


def outlined(tensors: Iterable[Located]) -> tuple[Outlined, ...]:
    return tuple([Outlined(name, local.dtype, spread) for name, local, spread in tensors])


@dataclass(frozen=True, slots=True)
class Cut:
    """A box that this rank writes of the ``number``-th tensor of a list, and where it lies in the local tensor; None if
    it is all of that."""

    number: int
    box: Box
    local: Box | None

    def of(self, tensor: Located) -> Tensor:
        if 0 in tensor.spread.shape:
            return tensor.local.new_empty(tensor.spread.shape)
        return tensor.local if self.local is None else narrow(tensor.local, self.local)


@dataclass(frozen=True)
class _Plan:
    fingerprint: tuple[int, str]
    replicated: bytes
    """See :class:`Party`."""
    shared: list[tuple[str, int]]
    """The tensors of ``replicated``, by section and number."""
    files: dict[str, tuple[list[Cut], FilePlan]] = field(default_factory=dict)
    """By section, where this rank writes any of it: the cuts in the order of the file's pieces, and the file's plan."""


@lru_cache(maxsize=KEPT_PLANS)
def _plan(frame: Frame, sections: tuple[tuple[str, tuple[Outlined, ...], tuple[tuple[str, str], ...]], ...]) -> _Plan:
    """Plan the files of tensors. ``sections``: (section, tensors, aliases) of each."""
    shared = sorted(  # ranks may list them in any order
        (section, tensor.name, number)
        for section, tensors, _ in sections
        for number, tensor in enumerate(tensors)
        if len(frame.ranks) > 1 and frame.holders_of(tensor.name, tensor.spread) == frame.ranks
    )
    names = "\n".join(name for _, name, _ in shared).encode(errors="surrogatepass")
    plan = _Plan(_fingerprint(sections), names, [(section, number) for section, _, number in shared])
    for section, tensors, aliases in sections:
        for tensor in tensors:
            check_name(tensor.name)
        others = dict(aliases)
        unique = sorted((t.name, number) for number, t in enumerate(tensors) if t.name not in others)
        cuts = my_cuts([(number, tensors[number]) for _, number in unique], frame)
        if cuts:
            own = [(tensors[cut.number], cut.box) for cut in cuts]
            file = plan_file([Piece(tensor.name, tensor.dtype, tensor.spread.shape, box) for tensor, box in own])
            plan.files[section] = [cuts[number] for number in file.order], file
    return plan


def my_cuts(tensors: Sequence[tuple[int, Outlined]], frame: Frame) -> list[Cut]:
    """What this rank writes: the boxes that it alone holds, and its share of the boxes that it holds as a replica."""
    cuts: list[Cut] = []
    by_holders: dict[tuple[int, ...], list[tuple[int, Outlined, LocalBox]]] = {}
    for number, tensor in tensors:
        for place in tensor.spread.boxes:
            by_holders.setdefault(frame.holders_of(tensor.name, tensor.spread), []).append((number, tensor, place))
    for holders, items in by_holders.items():
        shared = [Shared(place.box, tensor.dtype.itemsize) for _, tensor, place in items]
        parts = share(shared, len(holders), holders.index(frame.rank))
        for (number, tensor, place), part in zip(items, parts, strict=True):
            if part is not None:
                offsets = (a + b for a, b in zip(place.local_offsets, part.within(place.box).offsets))
                whole = part is place.box and len(tensor.spread.boxes) == 1
                cuts.append(Cut(number, part, None if whole else Box(tuple(offsets), part.sizes)))
    return cuts


def _fingerprint(sections: Iterable[tuple[str, Iterable[Outlined], Any]]) -> tuple[int, str]:
    """The number of tensors, and a hash of their names, dtypes and shapes; ranks of one mesh must agree on them."""
    lines = [
        f"{section}\0{tensor.name}\0{tensor.dtype}\0{tensor.spread.shape}"
        for section, tensors, _ in sections
        for tensor in tensors
    ]
    return len(lines), digest("\n".join(sorted(lines)).encode(errors="surrogatepass"))
