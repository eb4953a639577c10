"""Checks what all ranks have written, and merges it to one manifest. No I/O.

Checks that ranks of one mesh hold the same tensors, that each tensor's chunks cover it exactly, and that tensors which
several meshes hold are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lightning_shard.checkpoint.boxes import Box, coverage_fault
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest
from lightning_shard.checkpoint.format.text import Lines, Objects, chunk_texts, dump, tensor_line
from lightning_shard.checkpoint.saving.accounts import Alias, Joined, Party, Places
from lightning_shard.checkpoint.saving.replicated import FINGERPRINT_BYTES
from lightning_shard.errors import CheckpointError

LAYOUTS_KEPT = 64
"""Size of the cache of coverage checks: shapes and cuts repeat in each layer and from save to save."""
Name = tuple[str, str]
"""A tensor's section and name."""
Sums = dict[Name, int]
"""One rank's :func:`~lightning_shard.checkpoint.content.content_sum` of the chunks that it wrote, by tensor."""


@dataclass
class _Held:
    """A tensor as the ranks of one mesh hold it, merged from all groups of ranks.

    Attributes:
        head: The dtype and global shape, as the manifest's text has them.
        places: For each group, the index of its chunks' boxes in ``Merged._places``.
        chunks: For each group, its chunks' texts in the manifest.
    """

    mesh: int
    head: str
    places: list[int] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)

    def line(self) -> bytes:
        """The tensor's line in the manifest."""
        return tensor_line(self.head, self.chunks)

    def digests(self) -> dict[bytes, bytes]:
        """The chunks' block digests, keyed by the text of the chunk's box; without chunks of no bytes."""
        found = chunk_texts(b",".join(self.chunks))
        return {place: digests for _, begin, end, place, digests in found if begin != end}


class Merged:
    """What all ranks have written, merged.

    Meshes that hold different lists of tensors, such as pipeline stages, may have some tensors in common, such as tied
    embeddings at both ends of a pipeline. The checkpoint then has the first mesh's tensor, and the others must be equal
    to it.

    Args:
        parts: The joined accounts of all groups of ranks, in rank order.

    Raises:
        CheckpointError: Chunks of a tensor overlap or leave a gap, since a rank that holds it didn't write, or several
            wrote the same part; meshes hold different tensors under one name; or ranks tie tensors differently.
    """

    def __init__(self, parts: Sequence[Joined]) -> None:
        self.files: list[FileEntry] = []
        self.files_by_host: dict[str, list[FileEntry]] = {}
        """The files that the ranks of each machine have written, by host name."""
        self._state_file: int | None = None
        self._meshes: dict[tuple[int, ...], int] = {}
        self._places: dict[Places, int] = {}
        self._tensors: dict[str, dict[str, _Held]] = {}
        self._again: dict[tuple[str, str, int], _Held] = {}
        """Copies on further meshes of tensors that an earlier mesh has, by section, name and mesh."""
        self._aliases: dict[str, dict[str, str]] = {}
        self._of_ranks: dict[str, bytes] = {}
        """The manifest's text of tensors that belong to a single rank, by rank."""
        self._pairs: list[tuple[str, tuple[str, _Held], tuple[str, _Held]]] = []
        """Pairs of tensors that must be equal: (section, (name, tensor), (name, tensor))."""
        meshes = [[self._meshes.setdefault(ranks, len(self._meshes)) for ranks in part.meshes] for part in parts]
        parties = [p._replace(mesh=own[p.mesh]) for part, own in zip(parts, meshes) for p in part.parties]
        _check_agreement(parties, list(self._meshes))
        mesh_of = {rank: party.mesh for party in parties for rank in party.ranks}
        self._mesh_of = {rank: mesh_of[rank] for part in parts for rank in part.ranks}
        """Rank to mesh number, in the order of the accounts."""
        for part, own in zip(parts, meshes):
            self._add(part, own)
        self._pairs += [
            (section, (name, self._tensors[section][name]), (name, held))
            for (section, name, _), held in self._again.items()
        ]
        # after all tensors are known: a name may be an alias on one mesh and a plain tensor on another
        for part, own in zip(parts, meshes):
            for alias in part.aliases:
                self._add_alias(alias._replace(mesh=own[alias.mesh]))
        self._check_coverage()

    def _add(self, part: Joined, meshes: list[int]) -> None:
        if part.state_file is not None:
            self._state_file = part.state_file
        self.files += part.files
        self._of_ranks |= part.of_ranks
        for host, files in part.hosts.items():
            self.files_by_host.setdefault(host, []).extend(files)
        places = [self._places.setdefault(places, len(self._places)) for places in part.places]
        for one in part.tensors:
            tensors, mesh = self._tensors.setdefault(one.title, {}), meshes[one.mesh]
            held = tensors.get(one.name)
            if held is None:
                held = tensors[one.name] = _Held(mesh, one.head)
            elif held.mesh != mesh:
                held = self._again.setdefault((one.title, one.name, mesh), _Held(mesh, one.head))
            if held.head != one.head:
                (dtype, shape), (other_dtype, other_shape) = kind_of(one.head), kind_of(held.head)
                raise CheckpointError(
                    f"{one.name!r} is {dtype} {shape} on rank {one.rank}, and {other_dtype} {other_shape} on a rank"
                    " before it: ranks that hold one tensor must agree."
                )
            held.places.append(places[one.places])
            held.chunks.append(one.chunks)

    def _add_alias(self, alias: Alias) -> None:
        section, name, target, mesh, rank = alias
        tensors = self._tensors.setdefault(section, {})
        own = self._again.get((section, target, mesh), tensors.get(target))
        if own is None:
            raise CheckpointError(
                f"{name!r} shares its memory with {target!r} on rank {rank}, and no rank has written {target!r}:"
                " tensors that share memory must do so on all ranks that hold them, and be listed in the same order"
                " there."
            )
        plain = tensors.get(name)
        known = self._aliases.setdefault(section, {}).get(name)
        if plain is not None:
            if plain.mesh != mesh:
                self._pairs.append((section, (name, plain), (target, own)))
        elif known is None:
            self._aliases[section][name] = target
        elif known != target:
            self._pairs.append((section, (known, tensors[known]), (target, own)))

    def _check_coverage(self) -> None:
        held = [item for section in ("model", "optimizer") for item in self._tensors.get(section, {}).items()]
        held += [(name, one) for (_, name, _), one in self._again.items()]
        kept, sound = list(self._places), set()
        for name, one in held:
            cut = one.head, tuple(one.places)
            if cut in sound:
                continue
            fault = _coverage_fault(one.head, tuple(kept[number] for number in one.places))
            if fault is not None:
                raise CheckpointError(
                    f"The shards of {name!r} (global shape {kind_of(one.head)[1]}) don't cover the tensor exactly:"
                    f" {fault}. Either a rank that holds a shard isn't saving; or ranks hold different lists of"
                    " tensors, as pipeline stages do: then pass mesh=, the mesh of the ranks that hold the same list."
                )
            sound.add(cut)

    def unsettled(self) -> list[Name]:
        """The tensors that meshes cut into different chunks, so that block digests can't show whether they are equal.

        Raises:
            CheckpointError: Two copies of a tensor differ.
        """
        unsettled: dict[Name, None] = {}
        for section, (name, first), (other_name, other) in self._pairs:
            if first.head != other.head:
                raise self._differ(name, first, other)
            mine, theirs = first.digests(), other.digests()
            known = [box for box in mine.keys() & theirs.keys() if mine[box] and theirs[box]]
            if any(mine[box] != theirs[box] for box in known):
                raise self._differ(name, first, other)
            if not len(known) == len(mine) == len(theirs):
                unsettled |= {(section, name): None, (section, other_name): None}
        return list(unsettled)

    def settle(self, sums: list[Sums]) -> None:
        """Compare the :meth:`unsettled` tensors by their content sums; ``sums`` has those of each rank's chunks.

        Raises:
            CheckpointError: Two copies of a tensor differ.
        """
        totals: dict[tuple[str, str, int], int] = {}
        for mesh, own in zip(self._mesh_of.values(), sums, strict=True):
            for (section, name), value in own.items():
                totals[section, name, mesh] = totals.get((section, name, mesh), 0) + value
        for section, (name, first), (other_name, other) in self._pairs:
            mine, theirs = totals.get((section, name, first.mesh)), totals.get((section, other_name, other.mesh))
            if mine is not None and theirs is not None and (mine - theirs) % 2**64:
                raise self._differ(name, first, other)

    def _differ(self, name: str, first: _Held, other: _Held) -> CheckpointError:
        ranks = {number: _short(members) for members, number in self._meshes.items()}
        what = "content" if first.head == other.head else "dtype or shape"
        return CheckpointError(
            f"{name!r} is on the ranks {ranks[first.mesh]} and on the ranks {ranks[other.mesh]}, which hold different"
            f" lists of tensors, and differs in {what}: only one of the two can be saved. Different tensors need"
            " different names (number layers across all pipeline stages); tied tensors must be equal on all ranks."
        )

    def manifest(self, *, attempt: str, layout: Any, writer: str, digests: bool) -> Manifest:
        sections: dict[str, dict[str, bytes]] = {"model": {}, "optimizer": {}, "trainer": {}}
        for title, tensors in self._tensors.items():
            sections[title] = {name: held.line() for name, held in tensors.items()}
        for section, aliases in self._aliases.items():
            sections[section].update({name: dump({"same_as": of}).encode() for name, of in aliases.items()})
        return Manifest(
            attempt=attempt,
            files=self.files,
            layout=layout,
            world_size=len(self._mesh_of),
            writer=writer,
            block_bytes=BLOCK_BYTES if digests else 0,
            state_file=self._state_file,
            raw_sections={
                **{title: Lines(lines) for title, lines in sections.items()},
                "ranks": Objects(self._of_ranks),
            },
        )


def _check_agreement(parties: list[Party], meshes: list[tuple[int, ...]]) -> None:
    """Check that ranks of one mesh hold the same tensors: they share the writing, so some might have no writer else.

    Args:
        meshes: The ranks of each mesh, by its number.
    """
    party_of = {rank: party for party in parties for rank in party.ranks}
    compared: set[int] = set()
    for party in parties:
        # Linear in the mesh's ranks, which may be thousands: the first party of a mesh is compared with all of its
        # ranks, the other parties only with its first rank.
        mesh_ranks, rank = meshes[party.mesh], party.ranks[0]
        for member in mesh_ranks[:1] if party.mesh in compared else mesh_ranks:
            other = party_of.get(member)
            if other is None:
                raise CheckpointError(
                    f"Rank {rank} shares its tensors with rank {member}, which isn't saving: save on all ranks of the"
                    " mesh."
                )
            if other is not party and (other.mesh, other.fingerprint) != (party.mesh, party.fingerprint):
                raise CheckpointError(
                    f"Rank {rank} ({party.fingerprint[0]} tensors) and rank {member} ({other.fingerprint[0]} tensors)"
                    " belong to the same mesh, so they must hold the same tensors, but names, dtypes or shapes differ."
                    " If ranks hold different tensors, as pipeline stages do, pass mesh=, the mesh of those that hold"
                    " the same."
                )
        compared.add(party.mesh)
        if mesh_ranks:
            _check_contents(party, party_of[mesh_ranks[0]], rank, mesh_ranks[0])


def _check_contents(party: Party, other: Party, rank: int, other_rank: int) -> None:
    """Check that tensors replicated on two ranks, each of which writes a part of them, are equal."""
    if (party.contents, party.replicated) == (other.contents, other.replicated):
        return
    if party.replicated != other.replicated:
        raise CheckpointError(
            f"Rank {rank} and rank {other_rank} hold the same tensors, but different ones of them are replicated: use"
            " the same placements on all ranks of the mesh."
        )
    names = party.replicated.decode(errors="surrogatepass").split("\n")
    width = FINGERPRINT_BYTES
    for number, name in enumerate(names):
        if party.contents[number * width :][:width] != other.contents[number * width :][:width]:
            raise CheckpointError(
                f"{name!r} isn't sharded, but its values differ between rank {min(rank, other_rank)} and rank"
                f" {max(rank, other_rank)}, so it isn't clear which to save. Make them equal, for example by a"
                " broadcast before saving, or pass what belongs to each rank in rank_state=."
            )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _coverage_fault(head: str, places: tuple[Places, ...]) -> str | None:
    boxes = json.loads(f"[{','.join(f'{{{place}}}' for of_group in places for place in of_group)}]")
    return coverage_fault(kind_of(head)[1], [Box(tuple(box["offsets"]), tuple(box["sizes"])) for box in boxes])


def kind_of(head: str) -> tuple[str, tuple[int, ...]]:
    """A tensor's dtype and shape, parsed from the head of its text in the manifest."""
    fields = json.loads(head + "}")
    return fields["dtype"], tuple(fields["shape"])


def _short(ranks: Iterable[int]) -> str:
    listed = [*ranks]
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, … {listed[-1]}] ({len(listed)})"
