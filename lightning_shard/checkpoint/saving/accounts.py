"""Reports of what each rank has written, and their joining by group leaders. No I/O.

Each rank sends an :class:`Account` of its files. The leader of each group of ranks joins its group's accounts
(:func:`joined`) and makes the manifest's text of each tensor's chunks. So many ranks share the work that is
proportional to the chunks, and the first rank's work grows only with the tensors and the groups.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_shard.checkpoint.format.manifest import FileEntry
from lightning_shard.checkpoint.format.text import object_on_a_line, tensor_line
from lightning_shard.checkpoint.saving.files import Written


@dataclass
class Account:
    """What one rank has written: per section (``model``, ``optimizer``, ``trainer``, ``rank``) its files."""

    rank: int
    mesh_ranks: tuple[int, ...]
    """The ranks that hold the same list of tensors as this one."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes."""
    written: dict[str, list[Written]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    state_file: FileEntry | None = None
    host: str = field(default_factory=socket.gethostname)
    replicated: bytes = b""
    """Names of the tensors that are replicated on all of ``mesh_ranks``, one to a line."""
    contents: bytes = b""
    """A fingerprint of each replicated tensor's elements."""

    def add(self, section: str, written: Written) -> None:
        self.written.setdefault(section, []).append(written)

    def files(self) -> Iterator[FileEntry]:
        """The files in the manifest's order."""
        if self.state_file is not None:
            yield self.state_file
        for written in self.written.values():
            yield from (one.file for one in written)


def file_count(account: Account) -> int:
    return sum(1 for _ in account.files())


class Party(NamedTuple):
    """Ranks whose accounts agree in mesh, fingerprint, replicated tensors and contents; see :class:`Account`."""

    ranks: list[int]
    mesh: int
    """The index of their ``mesh_ranks`` in :attr:`Joined.meshes`."""
    fingerprint: tuple[int, str]
    replicated: bytes
    contents: bytes


class Held(NamedTuple):
    """A tensor as written by those ranks of a group that belong to one mesh.

    If these ranks disagree on its dtype or shape, there is one ``Held`` for each.

    Attributes:
        title: The section: ``model``, ``optimizer`` or ``trainer``.
        mesh: The index of the ranks' mesh in :attr:`Joined.meshes`.
        head: The dtype and global shape, as the manifest's text has them.
        rank: The first of the ranks that wrote a part of it.
        places: The index of its chunks' boxes in :attr:`Joined.places`.
        chunks: The chunks' texts in the manifest, joined by commas.
    """

    title: str
    name: str
    mesh: int
    head: str
    rank: int
    places: int
    chunks: bytes


class Alias(NamedTuple):
    section: str
    name: str
    target: str
    """The name of the tensor whose memory it shares."""
    mesh: int
    rank: int


Places = tuple[str, ...]
"""The boxes of a tensor's chunks, each as the manifest's text has it."""


@dataclass
class Joined:
    """The joined accounts of a group of ranks; what several of them have in common is stored once.

    Attributes:
        state_file: The index of the trainer state's file in the manifest; None if no rank of the group wrote it.
        hosts: The files written by the ranks of each machine, by host name.
        of_ranks: The manifest's text of tensors that belong to a single rank, by rank.
    """

    ranks: list[int]
    meshes: list[tuple[int, ...]]
    parties: list[Party]
    files: list[FileEntry]
    hosts: dict[str, list[FileEntry]]
    state_file: int | None
    tensors: list[Held]
    places: list[Places]
    aliases: list[Alias]
    of_ranks: dict[str, bytes]


def joined(accounts: Sequence[Account], files_before: int = 0) -> Joined:
    """Join the accounts of a group of ranks.

    Args:
        accounts: In rank order.
        files_before: The number of files that earlier groups' ranks have in the manifest.
    """
    meshes: dict[tuple[int, ...], int] = {}
    parties: dict[tuple[int, tuple[int, str], bytes, bytes], list[int]] = {}
    hosts: dict[str, list[FileEntry]] = {}
    files: list[FileEntry] = []
    state_file = None
    aliases: dict[tuple[str, str, str, int], int] = {}
    tensors: dict[tuple[str, str, int, str], _Chunks] = {}
    of_ranks: dict[str, bytes] = {}
    for account in accounts:
        mesh = meshes.setdefault(account.mesh_ranks, len(meshes))
        told = mesh, account.fingerprint, account.replicated, account.contents
        parties.setdefault(told, []).append(account.rank)
        if account.state_file is not None:
            state_file = files_before + len(files)
        hosts.setdefault(account.host, []).extend(account.files())
        number = files_before + len(files) + (account.state_file is not None)
        files += account.files()
        for section, of_section in account.written.items():
            found: dict[tuple[str, str, int, str], _Chunks] = {} if section == "rank" else tensors
            for written in of_section:
                for name, head, place, text in written.chunks(number):
                    own = found.get((section, name, mesh, head))
                    if own is None:
                        own = found[section, name, mesh, head] = _Chunks(account.rank)
                    own.places.append(place)
                    own.texts.append(text)
                number += 1
            if section == "rank":
                lines = ((name, tensor_line(head, [own.text()])) for (_, name, _, head), own in found.items())
                of_ranks[str(account.rank)] = object_on_a_line(lines)
        for section, targets in account.aliases.items():
            for name, target in targets.items():
                aliases.setdefault((section, name, target, mesh), account.rank)
    places: dict[Places, int] = {}
    held = [
        Held(*key, own.rank, places.setdefault(tuple(own.places), len(places)), own.text())
        for key, own in tensors.items()
    ]
    return Joined(
        ranks=[account.rank for account in accounts],
        meshes=list(meshes),
        parties=[Party(ranks, *told) for told, ranks in parties.items()],
        files=files,
        hosts=hosts,
        state_file=state_file,
        tensors=held,
        places=list(places),
        aliases=[Alias(*alias, rank) for alias, rank in aliases.items()],
        of_ranks=of_ranks,
    )


class _Chunks:
    """Accumulates the chunks of one tensor; ``rank`` is the first rank that wrote one."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.places: list[str] = []
        self.texts: list[str] = []

    def text(self) -> bytes:
        """The chunks' text in the manifest."""
        return ",".join(self.texts).encode()
