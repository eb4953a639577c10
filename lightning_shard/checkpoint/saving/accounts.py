"""Reports of what each rank has written, and their joining by group leaders. No I/O.

Each rank sends an :class:`Account` of its files. The leader of each group of ranks joins its group's accounts
(:func:`joined`), so that the first rank's work in Python grows only with the tensors and the groups; chunks are rows of
arrays on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from lightning_shard.checkpoint.format.manifest import FileEntry
from lightning_shard.checkpoint.format.table import Integers, Rows, padded
from lightning_shard.checkpoint.saving.files import Written


@dataclass
class Account:
    """What one rank has written: per section (``model``, ``optimizer``, ``trainer``, ``rank``) its files."""

    rank: int
    mesh_ranks: tuple[int, ...]
    """The ranks that hold the same list of tensors as this one."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes; equal on all ``mesh_ranks``."""
    written: dict[str, list[Written]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    """By section: name of a tensor that shares the memory of another, to that one's name."""
    state_file: FileEntry | None = None
    replicated: bytes = b""
    """Names of the tensors that are replicated on all of ``mesh_ranks``, one to a line."""
    contents: bytes = b""
    """A fingerprint of each replicated tensor's elements; equal on all ``mesh_ranks``."""

    def add(self, section: str, written: Written) -> None:
        self.written.setdefault(section, []).append(written)

    def files(self) -> Iterator[FileEntry]:
        """The files in the manifest's order."""
        if self.state_file is not None:
            yield self.state_file
        for written in self.written.values():
            yield from (one.file for one in written)


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
        title: The section: ``model``, ``optimizer`` or ``trainer``, or a rank's number, for tensors of it alone.
        mesh: The index of the ranks' mesh in :attr:`Joined.meshes`.
        rank: The first of the ranks that wrote a part of it.
    """

    title: str | int
    name: str
    mesh: int
    dtype: str
    shape: tuple[int, ...]
    rank: int


class Alias(NamedTuple):
    section: str
    name: str
    target: str
    """The name of the tensor whose memory it shares."""
    mesh: int
    rank: int


@dataclass
class Joined:
    """The joined accounts of a group of ranks; what several of them have in common is stored once.

    Attributes:
        state_file: The index in ``files`` of the trainer state's file; None if no rank of the group wrote it.
        rows: The chunks of all tensors; ``file`` is an index in ``files``.
        owners: For each row, the index of its tensor in ``tensors``.
    """

    ranks: list[int]
    meshes: list[tuple[int, ...]]
    parties: list[Party]
    files: list[FileEntry]
    state_file: int | None
    tensors: list[Held]
    rows: Rows
    owners: Integers
    aliases: list[Alias]


def joined(accounts: Sequence[Account]) -> Joined:
    """Join the accounts of a group of ranks, given in rank order."""
    meshes: dict[tuple[int, ...], int] = {}
    parties: dict[tuple[int, tuple[int, str], bytes, bytes], list[int]] = {}
    files: list[FileEntry] = []
    state_file = None
    aliases: dict[tuple[str, str, str, int], int] = {}
    tensors = _Tensors()
    parts: list[tuple[Written, int]] = []
    owners: list[Integers] = []
    for account in accounts:
        mesh = meshes.setdefault(account.mesh_ranks, len(meshes))
        told = mesh, account.fingerprint, account.replicated, account.contents
        parties.setdefault(told, []).append(account.rank)
        if account.state_file is not None:
            state_file = len(files)
        number = len(files) + (account.state_file is not None)
        files += account.files()
        for section, of_section in account.written.items():
            for written in of_section:
                title = account.rank if section == "rank" else section
                owners.append(tensors.numbers(title, mesh, account.rank, written.columns.tensors))
                parts.append((written, number))
                number += 1
        for section, targets in account.aliases.items():
            for name, target in targets.items():
                aliases.setdefault((section, name, target, mesh), account.rank)
    return Joined(
        ranks=[account.rank for account in accounts],
        meshes=list(meshes),
        parties=[Party(ranks, *told) for told, ranks in parties.items()],
        files=files,
        state_file=state_file,
        tensors=tensors.held,
        rows=_rows(parts),
        owners=np.concatenate([np.empty(0, np.int64), *owners]),
        aliases=[Alias(*alias, rank) for alias, rank in aliases.items()],
    )


class _Tensors:
    """Numbers the tensors of a group of ranks."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._texts: dict[tuple[str | int, int, str], Integers] = {}

    def numbers(self, title: str | int, mesh: int, rank: int, text: str) -> Integers:
        """The number of each tensor of a file; ``text`` is its :attr:`Columns.tensors`."""
        found = self._texts.get((title, mesh, text))
        if found is None:
            numbers = []
            for name, dtype, shape in json.loads(text):
                held = Held(title, name, mesh, dtype, tuple(shape), rank)
                numbers.append(self._known.setdefault(held[:-1], len(self.held)))
                if numbers[-1] == len(self.held):
                    self.held.append(held)
            found = self._texts[title, mesh, text] = np.array(numbers, np.int64)
        return found


def _rows(parts: Sequence[tuple[Written, int]]) -> Rows:
    """The chunks of files, given with their numbers."""
    dims = max((written.columns.sizes.shape[1] for written, _ in parts), default=0)
    digests = np.frombuffer(b"".join(written.digests for written, _ in parts), np.uint8).reshape(-1, DIGEST_BYTES)
    none, no_box = np.empty(0, np.int64), np.empty((0, dims), np.int64)
    begins = [written.columns.begins + written.file.header_bytes for written, _ in parts]
    blocks = [-(-written.columns.nbytes // BLOCK_BYTES) * bool(written.digests) for written, _ in parts]
    counts = np.concatenate([none, *blocks])
    numbers, lengths = [number for _, number in parts], [len(begin) for begin in begins]
    return Rows(
        np.repeat(np.array(numbers, np.int64), lengths),
        np.concatenate([none, *begins]),
        np.cumsum(counts) - counts,
        np.concatenate([no_box, *(padded(written.columns.offsets, dims, 0) for written, _ in parts)]),
        np.concatenate([no_box, *(padded(written.columns.sizes, dims, 1) for written, _ in parts)]),
        digests,
    )
