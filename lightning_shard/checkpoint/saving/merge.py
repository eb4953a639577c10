"""Checks what all ranks have written, and merges it to one manifest. No I/O.

Checks that ranks of one mesh hold the same tensors, that each tensor's chunks cover it exactly, and that tensors which
several meshes hold are equal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_shard.checkpoint.boxes import Box, coverage_fault, uncovered
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES
from lightning_shard.checkpoint.format.chunks import TensorEntry
from lightning_shard.checkpoint.format.header import item_bytes
from lightning_shard.checkpoint.format.manifest import OWN_WRITER, Manifest, Section
from lightning_shard.checkpoint.format.table import Integers
from lightning_shard.checkpoint.saving.accounts import Account, Alias, Party, joined
from lightning_shard.checkpoint.saving.part import FINGERPRINT_BYTES
from lightning_shard.checkpoint.tensors import short
from lightning_shard.errors import CheckpointError
from lightning_shard.installed import version

WRITER = OWN_WRITER + version()
Name = tuple[str, str]
"""A tensor's section and name."""
Sums = dict[Name, int]
"""One rank's :func:`~lightning_shard.checkpoint.content.content_sum` of the chunks that it wrote, by tensor."""


class Held(NamedTuple):
    """A tensor as the ranks of one mesh hold it; see :class:`Listed` for ``title`` and ``rank``."""

    title: str | int
    name: str
    mesh: int
    dtype: str
    shape: tuple[int, ...]
    rank: int


class Merged:
    """What all ranks have written, merged.

    Meshes that hold different lists of tensors, such as pipeline stages, may have some tensors in common, such as tied
    embeddings at both ends of a pipeline. The checkpoint then has the first mesh's tensor, and the others must be equal
    to it.

    Args:
        parts: The accounts of all ranks, or groups of ranks, in rank order.

    Raises:
        CheckpointError: Chunks of a tensor overlap or leave a gap, since a rank that holds it didn't write, or several
            wrote the same part; meshes hold different tensors under one name; or ranks tie tensors differently.
    """

    def __init__(self, parts: Sequence[Account]) -> None:
        self._account = account = joined(parts)
        self._all: list[Held] = []
        """The tensors as each mesh holds them. A tensor's number is its index here."""
        self._tensors: dict[str | int, dict[str, int]] = {}
        """The first mesh's numbers by section, or by rank for tensors of it alone, and by name."""
        self._numbers: dict[tuple[str | int, str, int], int] = {}
        """The numbers of all, by section, name and mesh."""
        self._aliases: dict[str, dict[str, str]] = {}
        self._pairs: list[tuple[Held, Held]] = []
        """Pairs of tensors of one section that must be equal."""
        _check_agreement(account.parties, account.meshes)
        owner = self._number_all()[account.owners]
        order = np.argsort(owner, kind="stable")
        self._rows = account.rows.taken(order)
        self._bounds = np.searchsorted(owner[order], np.arange(len(self._all) + 1))
        for (section, name, _), number in self._numbers.items():
            if (first := self._tensors[section][name]) != number:
                self._pairs.append((self._all[first], self._all[number]))
        # after all tensors are known: a name may be an alias on one mesh and a plain tensor on another
        for alias in account.aliases:
            self._add_alias(alias)
        self._check_coverage()

    def _number_all(self) -> Integers:
        """The number of each of the account's tensors."""
        parsed = {text: json.loads(text) for text in {listed.text for listed in self._account.lists}}
        numbers = [
            self._number(Held(listed.title, name, listed.mesh, dtype, tuple(shape), listed.rank))
            for listed in self._account.lists
            for name, dtype, shape in parsed[listed.text]
        ]
        return np.array(numbers, np.int64)

    def _number(self, held: Held) -> int:
        number = self._numbers.setdefault(held[:3], len(self._all))
        if number == len(self._all):
            self._all.append(held)
            self._tensors.setdefault(held.title, {}).setdefault(held.name, number)
        known = self._all[number]
        if not _alike(known, held):
            raise CheckpointError(
                f"{held.name!r} is {held.dtype} {held.shape} on rank {held.rank}, and {known.dtype} {known.shape} on a"
                " rank before it: ranks that hold one tensor must agree."
            )
        return number

    def _add_alias(self, alias: Alias) -> None:
        section, name, target, mesh, rank = alias
        tensors = self._tensors.setdefault(section, {})
        own = self._numbers.get((section, target, mesh), tensors.get(target))
        if own is None:
            raise CheckpointError(
                f"{name!r} shares its memory with {target!r} on rank {rank}, and no rank has written {target!r}:"
                " tensors that share memory must do so on all ranks that hold them, and be listed in the same order"
                " there."
            )
        known = self._aliases.setdefault(section, {}).get(name)
        if name in tensors:
            if self._all[tensors[name]].mesh != mesh:
                self._pairs.append((self._all[tensors[name]], self._all[own]))
        elif known is None:
            self._aliases[section][name] = target
        elif known != target:
            self._pairs.append((self._all[tensors[known]], self._all[own]))

    def _check_coverage(self) -> None:
        shapes = np.ones((len(self._all), self._rows.sizes.shape[1]), np.int64)
        for number, held in enumerate(self._all):
            shapes[number, : len(held.shape)] = held.shape
        wrong = uncovered(shapes, self._bounds, self._rows.offsets, self._rows.sizes)
        if not wrong.any():
            return
        held = self._all[int(np.flatnonzero(wrong)[0])]
        fault = coverage_fault(held.shape, self._boxes(held))
        raise CheckpointError(
            f"The shards of {held.name!r} (global shape {held.shape}) don't cover the tensor exactly: {fault}."
            " Either a rank that holds a shard isn't saving; or ranks hold different lists of tensors, as pipeline"
            " stages do: then pass mesh=, the mesh of the ranks that hold the same list."
        )

    def _span(self, held: Held) -> tuple[int, int]:
        """The rows of a tensor's chunks: the first, and the one after the last."""
        number = self._numbers[held.title, held.name, held.mesh]
        first, last = self._bounds[number : number + 2].tolist()
        return first, last

    def _boxes(self, held: Held) -> list[Box]:
        return self._rows.boxes(*self._span(held), len(held.shape))

    def _digests(self, held: Held) -> dict[Box, bytes]:
        """The chunks' block digests by box; without chunks of no bytes."""
        found = {}
        for box, start in zip(self._boxes(held), self._rows.block[slice(*self._span(held))].tolist()):
            if blocks := -(-box.numel * item_bytes(held.dtype) // BLOCK_BYTES):
                found[box] = self._rows.digests[start : start + blocks].tobytes()
        return found

    def unsettled(self) -> list[Name]:
        """The tensors that meshes cut into different chunks, so that block digests can't show if they are equal."""
        unsettled: dict[Name, None] = {}
        for first, other in self._pairs:
            if not _alike(first, other):
                raise self._differ(first, other)
            mine, theirs = self._digests(first), self._digests(other)
            known = [box for box in mine.keys() & theirs.keys() if mine[box] and theirs[box]]
            if any(mine[box] != theirs[box] for box in known):
                raise self._differ(first, other)
            if not len(known) == len(mine) == len(theirs):
                unsettled |= {(str(held.title), held.name): None for held in (first, other)}
        return list(unsettled)

    def settle(self, sums: list[Sums]) -> None:
        """Compare the :meth:`unsettled` tensors by their content sums; ``sums`` has those of each rank's chunks."""
        totals: dict[tuple[str, str, int], int] = {}
        mesh_of = {rank: party.mesh for party in self._account.parties for rank in party.ranks}
        for mesh, own in zip((mesh_of[rank] for rank in self._account.ranks), sums, strict=True):
            for (section, name), value in own.items():
                totals[section, name, mesh] = totals.get((section, name, mesh), 0) + value
        for pair in self._pairs:
            mine, theirs = (totals.get((str(held.title), held.name, held.mesh)) for held in pair)
            if mine is not None and theirs is not None and (mine - theirs) % 2**64:
                raise self._differ(*pair)

    def _differ(self, first: Held, other: Held) -> CheckpointError:
        ranks = [short(members) for members in self._account.meshes]
        what = "content" if _alike(first, other) else "dtype or shape"
        return CheckpointError(
            f"{first.name!r} is on the ranks {ranks[first.mesh]} and on the ranks {ranks[other.mesh]}, which hold"
            f" different lists of tensors, and differs in {what}: only one of the two can be saved. Different tensors"
            " need different names (number layers across all pipeline stages); tied tensors must be equal on all ranks."
        )

    def manifest(self, *, attempt: str, layout: Any, digests: bool) -> Manifest:
        kept: list[Integers] = []
        files, rows, bounds = self._account.files, 0, self._bounds.tolist()

        def section(title: str | int) -> Section:
            nonlocal rows
            tensors: dict[str, TensorEntry] = {}
            for name, number in self._tensors.get(title, {}).items():
                held, (first, last) = self._all[number], bounds[number : number + 2]
                kept.append(np.arange(first, last))
                tensors[name] = TensorEntry(held.dtype, held.shape, (rows, rows + last - first))
                rows += last - first
            return Section(tensors, self._aliases.get(str(title)))

        manifest = Manifest(
            attempt=attempt,
            files=files,
            layout=layout,
            world_size=len(self._account.ranks),
            writer=WRITER,
            block_bytes=BLOCK_BYTES if digests else 0,
            state_file=next((number for number, file in enumerate(files) if not file.header_bytes), None),
            model=section("model"),
            optimizer=section("optimizer"),
            trainer=section("trainer"),
            ranks={title: section(title) for title in self._tensors if isinstance(title, int)},
        )
        order = np.concatenate([np.empty(0, np.int64), *kept])
        return manifest.with_rows(self._rows.taken(order))


def _alike(one: Held, other: Held) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


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
