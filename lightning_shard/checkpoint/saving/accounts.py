"""Reports of what ranks have written, and their joining by group leaders. No I/O.

Each rank sends an :class:`Account` of its files. The leader of each group of ranks joins its group's accounts to one
(:func:`joined`), and the first rank those of the leaders, so that its work in Python grows only with the tensors and
the groups; chunks are rows of arrays on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightning_shard.checkpoint.format.manifest import FileEntry
from lightning_shard.checkpoint.format.table import Integers, Rows
from lightning_shard.checkpoint.saving.files import Written


class Party(NamedTuple):
    """Ranks that agree in all of these."""

    ranks: list[int]
    mesh: int
    """The index in :attr:`Account.meshes` of the ranks that hold the same list of tensors."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes; equal on all ranks of the mesh."""
    replicated: bytes = b""
    """Names of the tensors that are replicated on all ranks of the mesh, one to a line."""
    contents: bytes = b""
    """A fingerprint of each replicated tensor's elements; equal on all ranks of the mesh."""


class Listed(NamedTuple):
    """The tensors of a file's chunks, one for each; ranks that write parts of the same tensors have the same ones.

    Attributes:
        title: The section: ``model``, ``optimizer`` or ``trainer``, or a rank's number, for tensors of it alone.
        mesh: The index of the ranks' mesh in :attr:`Account.meshes`.
        text: See :attr:`~lightning_shard.checkpoint.saving.files.Written.tensors`.
        length: How many they are.
        rank: The first of the ranks that wrote such a file.
    """

    title: str | int
    mesh: int
    text: str
    length: int
    rank: int


class Alias(NamedTuple):
    section: str
    name: str
    target: str
    """The name of the tensor whose memory it shares."""
    mesh: int
    rank: int


@dataclass
class Account:
    """What a rank has written, or several ranks together; what several of them have in common is stored once.

    Attributes:
        files: Those of tensors, which :meth:`add` adds, and the trainer state's, which has no rows.
        rows: The chunks of all files; ``file`` is an index in ``files``.
        owners: For each row, the number of its tensor, where those of ``lists`` are numbered through.
    """

    ranks: list[int]
    meshes: list[tuple[int, ...]]
    parties: list[Party]
    aliases: list[Alias]
    files: list[FileEntry] = field(default_factory=list)
    lists: list[Listed] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows.none)
    owners: Integers = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of_rank(
        cls, rank: int, mesh_ranks: tuple[int, ...], aliases: Mapping[str, Mapping[str, str]] | None = None, **told: Any
    ) -> Account:
        """The account of one rank, which has written nothing yet.

        Args:
            mesh_ranks: The ranks that hold the same list of tensors as this one.
            aliases: By section: name of a tensor that shares the memory of another, to that one's name.
            told: See :class:`Party`.
        """
        shared = [(section, *pair) for section, targets in (aliases or {}).items() for pair in targets.items()]
        return cls([rank], [mesh_ranks], [Party([rank], 0, **told)], [Alias(*names, 0, rank) for names in shared])

    def add(self, section: str, written: Written) -> None:
        """Add a file of the account's one rank, of tensors of a section; those of ``rank`` are the rank's own."""
        title, count = self.ranks[0] if section == "rank" else section, len(written.rows.file)
        self.owners = np.concatenate([self.owners, np.arange(count) + sum(listed.length for listed in self.lists)])
        self.rows = Rows.joined([self.rows, written.rows], [0, len(self.files)])
        self.lists.append(Listed(title, 0, written.tensors, count, self.ranks[0]))
        self.files.append(written.file)


def joined(parts: Sequence[Account]) -> Account:
    """Join the accounts of ranks, or of groups of ranks, given in rank order."""
    meshes: dict[tuple[int, ...], int] = {}
    parties: dict[tuple[Any, ...], list[int]] = {}
    aliases: dict[tuple[str, str, str, int], int] = {}
    texts: dict[str, str] = {}
    lists: dict[tuple[str | int, int, str], Listed] = {}
    begins: dict[tuple[str | int, int, str], int] = {}
    """The number of each list's first tensor."""
    files: list[FileEntry] = []
    tensors = 0
    befores: list[int] = []
    owners: list[Integers] = []
    for part in parts:
        own = [meshes.setdefault(mesh, len(meshes)) for mesh in part.meshes]
        for party in part.parties:
            parties.setdefault((own[party.mesh], *party[2:]), []).extend(party.ranks)
        for section, name, target, mesh, rank in part.aliases:
            aliases.setdefault((section, name, target, own[mesh]), rank)
        befores.append(len(files))
        files += part.files
        numbers = [np.empty(0, np.int64)]
        for listed in part.lists:
            key = listed.title, own[listed.mesh], texts.setdefault(listed.text, listed.text)
            if key not in lists:
                lists[key], begins[key] = Listed(*key, listed.length, listed.rank), tensors
                tensors += listed.length
            numbers.append(np.arange(begins[key], begins[key] + listed.length))
        owners.append(np.concatenate(numbers)[part.owners])
    return Account(
        ranks=[rank for part in parts for rank in part.ranks],
        meshes=list(meshes),
        parties=[Party(ranks, *told) for told, ranks in parties.items()],
        aliases=[Alias(*alias, rank) for alias, rank in aliases.items()],
        files=files,
        lists=list(lists.values()),
        rows=Rows.joined([part.rows for part in parts], befores),
        owners=np.concatenate(owners),
    )
