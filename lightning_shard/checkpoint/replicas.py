"""Ranks that hold a tensor alike read it once between them: each its share, which it then passes on to the others.

Worth it where all ranks read through one network, as from an object store: of what ``r`` replicas need, it carries an
``r``-th. Who reads what follows from the tensors' layouts, like who writes what. Only whether all of the replicas ask
for the same is talked about: one that waits for a tensor that no other passes on would wait forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.commit import Ranks, together
from lightning_shard.checkpoint.dtensor import is_dtensor, replicated_over
from lightning_shard.checkpoint.fetch import Read, narrow
from lightning_shard.checkpoint.manifest import digest
from lightning_shard.checkpoint.plan import Shared, share

MIN_BYTES = 2**20
"""What is less than this in all, each replica reads by itself."""
PIECE_BYTES = 64 * 2**20
"""How much is passed on at a time."""


@dataclass(frozen=True)
class Replicas:
    """Ranks of the world that hold some tensors alike, in the order of their process group."""

    ranks: tuple[int, ...]
    name: str
    """Of the process group, the same on all of its ranks."""
    group: Any = field(compare=False)

    @property
    def key(self) -> Key:
        return self.ranks, self.name


Key = tuple[tuple[int, ...], str]
Held = dict[Replicas, list[Read]]
"""What this rank needs and some replicas of it need too."""


@dataclass(frozen=True)
class Share:
    """What one of the replicas reads, and the others get from it."""

    replicas: Replicas
    owner: int
    """The reader's rank in the world."""
    read: Read


def replicas_of(tensor: Tensor, ranks: Ranks) -> Replicas | None:
    """The ranks that hold what this rank holds of a tensor; None where no others do, or it can't be sent to them.

    Those of a DTensor are along the largest axis of its mesh that replicates it; a plain tensor's are all ranks.
    """
    if ranks.alone:
        return None
    group = replicated_over(tensor) if is_dtensor(tensor) else ranks.group
    if group is None or f"{tensor.device.type}:" not in dist.get_backend_config(group):
        return None
    members = tuple(dist.get_process_group_ranks(group))
    return Replicas(members, group.group_name, group) if set(members) <= set(ranks.members) else None


def share_out(held: Held, ranks: Ranks) -> tuple[list[Read], list[Share]]:
    """Who of the replicas reads what; a collective call of all ranks that load.

    Returns:
        The reads of which some replicas don't need the same, which are this rank's alone; and the shares of all
        others, in the same order on every rank.
    """
    held = {replicas: _in_order(reads) for replicas, reads in held.items()}
    large = {r: reads for r, reads in held.items() if sum(_shared(read).nbytes for read in reads) >= MIN_BYTES}
    agreed: set[Key] = set()
    if any(ranks.any(bool(large))):
        asked = {replicas.key: _fingerprint(reads) for replicas, reads in large.items()}
        agreed = together(ranks, lambda: asked, lambda everyone: _agreed(dict(zip(ranks.members, everyone))))
    alone = [read for replicas, reads in held.items() if replicas.key not in agreed for read in reads]
    # the same order on every rank, also between process groups: else two ranks could wait for each other in two of them
    together_read = sorted((r for r in large if r.key in agreed), key=lambda replicas: replicas.key)
    return alone, [share for replicas in together_read for share in _deal(replicas, large[replicas])]


def pass_on(shares: Iterable[Share]) -> None:
    """Give every replica what one of them has read; collective over them."""
    for item in shares:
        _broadcast(item.read.target, item.owner, item.replicas.group)


def _in_order(reads: Sequence[Read]) -> list[Read]:
    """As the tensors were written in: so the shares of a layout that is loaded as it was saved are whole chunks."""
    return sorted(reads, key=lambda read: (read.name, read.box.offsets))


def _shared(read: Read) -> Shared:
    return Shared(read.box, read.target.element_size())


def _fingerprint(reads: Iterable[Read]) -> str:
    lines = [f"{r.name}\0{r.entry.dtype}\0{r.entry.shape}\0{r.box}\0{r.target.dtype}" for r in reads]
    return digest("\n".join(lines).encode(errors="surrogatepass"))


def _agreed(asked: Mapping[int, Mapping[Key, str]]) -> set[Key]:
    """Of what each rank asked for, by its number: the replicas that all ask for the same."""
    keys = {key for of_rank in asked.values() for key in of_rank}
    return {key for key in keys if len({asked[rank].get(key) for rank in key[0]}) == 1}


def _deal(replicas: Replicas, reads: Sequence[Read]) -> Iterable[Share]:
    parts = [
        share([_shared(read) for read in reads], len(replicas.ranks), index) for index in range(len(replicas.ranks))
    ]
    for read, of_each in zip(reads, zip(*parts), strict=True):
        for owner, box in zip(replicas.ranks, of_each, strict=True):
            if box is not None and box.numel:
                part = replace(read, box=box, target=narrow(read.target, box.within(read.box)))
                yield Share(replicas, owner, part)


def _broadcast(tensor: Tensor, owner: int, group: Any) -> None:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    # as bytes: backends don't know all dtypes
    memory = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    for piece in memory.split(PIECE_BYTES):
        dist.broadcast(piece, src=owner, group=group)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)
