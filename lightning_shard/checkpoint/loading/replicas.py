"""Shared reading of replicated tensors: each replica reads a part from the store and broadcasts it to the others.

Worth it where all ranks read through one network, such as from an object store: ``r`` replicas then load 1/``r`` of the
bytes. Which replica reads what follows from the tensors' layouts, as for writing, without communication. One collective
checks that all replicas ask for the same boxes, since a rank that waits for a broadcast that no other joins would hang.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.engine import groups
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.memory import narrow
from lightning_shard.checkpoint.ranks import Ranks, together
from lightning_shard.checkpoint.shards import Shared, deal
from lightning_shard.checkpoint.tensors import Spread
from lightning_shard.tree import as_bytes

MIN_BYTES = 2**20
"""If a group of replicas needs less than this in all, each replica reads it by itself."""
PIECE_BYTES = 64 * 2**20
"""Largest size of one broadcast of a large tensor."""
SMALL_BYTES, PACK_BYTES = 2**20, 16 * 2**20
"""Tensors below SMALL_BYTES are packed into broadcasts of PACK_BYTES, since a broadcast for each would cost more."""
_ALIGNMENT = 16  # of each packed tensor, so that the bytes can be viewed as any dtype


class Wanted(NamedTuple):
    """One box that this rank wants to read, and the layout of the tensor that it is read into."""

    spread: Spread
    read: Read


@dataclass(frozen=True)
class Replicas:
    """Global ranks that hold replicas of some tensors, in the order of their process group."""

    ranks: tuple[int, ...]
    name: str
    """The process group's name, the same on all of its ranks."""
    group: Any = field(compare=False)

    @property
    def key(self) -> Key:
        return self.ranks, self.name


Key = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Assigned:
    """A box that one replica (the owner) reads and broadcasts to the others."""

    replicas: Replicas
    owner: int
    """The reader's global rank."""
    read: Read


def shareable(wanted: Iterable[Wanted], ranks: Ranks) -> dict[Replicas, list[Ordered]]:
    """The boxes whose reading replicas could share, of those that have enough bytes to be worth a collective.

    In the order of writing, so that on the layout that saved each part is a whole chunk.
    """
    held: dict[Replicas, list[Ordered]] = {}
    for item, replicas in _with_replicas(wanted, ranks):
        if replicas is not None:
            held.setdefault(replicas, []).append((_order(item.read), item.read))
    return {
        replicas: sorted(items, key=itemgetter(0))
        for replicas, items in held.items()
        if sum(_shared(read).nbytes for _, read in items) >= MIN_BYTES
    }


def settle(held: Mapping[Replicas, list[Ordered]], ranks: Ranks) -> tuple[set[int], list[Assigned]]:
    """Agree on who reads what. A collective call of all ranks that load.

    Returns:
        The ``id`` of each read that is shared, since its replicas all want the same; and the assignment of these, in
        the same order on every rank.
    """
    asked = {replicas.key: _fingerprint(items) for replicas, items in held.items()}
    agreed = together(ranks, lambda: asked, lambda everyone: _agreed(dict(zip(ranks.members, everyone))))
    shared: set[int] = set()
    assigned: list[Assigned] = []
    # process groups in sorted order: else two ranks could deadlock, each in another group's broadcast
    for replicas, items in sorted(held.items(), key=lambda each: each[0].key):
        if replicas.key in agreed:
            shared.update(id(read) for _, read in items)
            assigned += _assign(replicas, items)
    return shared, assigned


def pass_on(assigned: Iterable[Assigned]) -> None:
    """Broadcast what each owner has read to the other replicas. A collective call over each group of replicas."""
    for (replicas, owner), items in itertools.groupby(assigned, key=lambda item: (item.replicas, item.owner)):
        for batch in _batches(item.read.target for item in items):
            _broadcast(batch, owner, replicas.group)


# -- replicas of a tensor ---------------------------------------------------------------------------------------------


def _with_replicas(wanted: Iterable[Wanted], ranks: Ranks) -> Iterator[tuple[Wanted, Replicas | None]]:
    """Yield each wanted box with its replicas; None if there are none, or their group has no backend for the device.

    Replicas of a DTensor are the ranks along the largest mesh axis that replicates it; of a plain tensor, all ranks.
    """
    known: dict[Any, Replicas | None] = {}
    for item in wanted:
        if not item.read.stored.checkpoint.share_reads or ranks.alone:
            yield item, None
            continue
        mesh, placements, device = item.spread.mesh, item.spread.placements, item.read.target.device
        key = id(mesh), placements, device.type
        if key not in known:
            group, known[key] = ranks.group if mesh is None else mesh.replicated_over(placements), None
            if group is not None and f"{device.type}:" in dist.get_backend_config(group):
                members = tuple(dist.get_process_group_ranks(group))
                if set(members) <= set(ranks.members):
                    known[key] = Replicas(members, group.group_name, group)
        yield item, known[key]


# -- agreement on what is wanted, and assignment of reads -------------------------------------------------------------


Order = tuple[str, str, str, tuple[int, ...], str, int]
"""A sort key that identifies a box on any rank. One name may be in two sections, or in two checkpoints."""
Ordered = tuple[Order, Read]


def _order(read: Read) -> Order:
    stored = read.stored
    entry, manifest = stored.entry, stored.checkpoint.manifest
    path, begin = "", 0
    if entry.chunk_count:
        file, begin = manifest.chunks.start(entry)
        path = manifest.files[file].path
    return stored.checkpoint.path, path.partition("/")[0], stored.name, read.box.offsets, path, begin


def _fingerprint(items: Iterable[Ordered]) -> str:
    lines = []
    for order, read in items:
        entry, target = read.stored.entry, read.target
        lines.append(f"{order}\0{entry.dtype}\0{entry.shape}\0{read.box}\0{target.dtype}\0{target.device.type}")
    return digest("\n".join(lines).encode(errors="surrogatepass"))


def _agreed(asked: Mapping[int, Mapping[Key, str]]) -> set[Key]:
    """The groups of replicas whose ranks all ask for the same; ``asked``: by rank, a fingerprint for each group."""
    keys = {key for of_rank in asked.values() for key in of_rank}
    return {key for key in keys if len({asked[rank].get(key) for rank in key[0]}) == 1}


def _shared(read: Read) -> Shared:
    return Shared(read.box, read.target.element_size())


def _assign(replicas: Replicas, items: Iterable[Ordered]) -> list[Assigned]:
    """Assign boxes to owners, each of which reads what it would write of a section; sorted by owner."""
    assigned = []
    for _, of_section in itertools.groupby(items, key=lambda ordered: ordered[0][:2]):
        section = [item for _, item in of_section]
        for number, index, box in deal([_shared(item) for item in section], len(replicas.ranks)):
            read = section[number]
            part = Read(read.stored, box, narrow(read.target, box.within(read.box)))
            assigned.append(Assigned(replicas, replicas.ranks[index], part))
    return sorted(assigned, key=lambda item: item.owner)


# -- broadcasting -----------------------------------------------------------------------------------------------------


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield what one broadcast carries: a piece of a large tensor, or several small ones.

    It depends on sizes alone, so it is the same on all ranks.
    """
    small = []
    for tensor in tensors:
        if tensor.nbytes < SMALL_BYTES:
            small.append(tensor)
            continue
        for box in slabs(Box.whole(tensor.shape), PIECE_BYTES // tensor.element_size()):
            yield [narrow(tensor, box)]
    yield from groups(small, lambda tensor: tensor.nbytes, PACK_BYTES)


def _broadcast(tensors: Sequence[Tensor], owner: int, group: Any) -> None:
    """Broadcast tensors as bytes, since backends don't support all dtypes."""
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not first.is_conj() and not first.is_neg():
        dist.broadcast(as_bytes(first), src=owner, group=group)
        return
    begins = list(itertools.accumulate((-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in tensors), initial=0))
    packed = torch.empty(begins[-1], dtype=torch.uint8, device=first.device)
    places = [packed[begin : begin + tensor.nbytes] for begin, tensor in zip(begins, tensors)]
    if dist.get_rank() == owner:
        for place, tensor in zip(places, tensors):
            place.copy_(as_bytes(tensor.resolve_conj().resolve_neg().contiguous()))
    dist.broadcast(packed, src=owner, group=group)
    if dist.get_rank() != owner:
        for place, tensor in zip(places, tensors):
            tensor.copy_(place.view(tensor.dtype).view(tensor.shape))
