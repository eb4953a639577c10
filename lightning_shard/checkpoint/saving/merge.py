"""All ranks' accounts of what they have written, checked and merged to one manifest. No I/O."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lightning_shard.checkpoint.boxes import Box, coverage_fault
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest
from lightning_shard.checkpoint.format.text import Lines, chunk_text, dump, tensor_line
from lightning_shard.checkpoint.saving.files import Written, WrittenChunk
from lightning_shard.checkpoint.saving.replicated import FINGERPRINT_BYTES
from lightning_shard.errors import CheckpointError

LAYOUTS_KEPT = 64
"""Shapes and how they are cut, most of them alike in each layer and from save to save: checked once."""
Name = tuple[str, str]
"""A tensor's section and name."""
Sums = dict[Name, int]
"""A rank's :func:`~lightning_shard.checkpoint.content.content_sum` of what it wrote of some tensors."""


@dataclass
class Account:
    """What one rank has written: per section (``model``, ``optimizer``, ``trainer``, ``rank``) its files."""

    rank: int
    mesh_ranks: tuple[int, ...]
    """The ranks that hold the same tensors as this one."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes."""
    written: dict[str, list[Written]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    state_file: FileEntry | None = None
    host: str = field(default_factory=socket.gethostname)
    replicated: bytes = b""
    """Names of the tensors that all of ``mesh_ranks`` hold alike, one to a line."""
    contents: bytes = b""
    """A fingerprint of each."""

    def add(self, section: str, written: Written) -> None:
        self.written.setdefault(section, []).append(written)

    def files(self) -> Iterator[FileEntry]:
        if self.state_file is not None:
            yield self.state_file
        for written in self.written.values():
            yield from (one.file for one in written)


def files_by_host(accounts: Iterable[Account]) -> dict[str, list[FileEntry]]:
    """What the ranks of each machine have written."""
    files: dict[str, list[FileEntry]] = {}
    for account in accounts:
        files.setdefault(account.host, []).extend(account.files())
    return files


@dataclass
class _Held:
    """A tensor as the ranks of one mesh hold it, and its chunks with the indices of their files."""

    mesh: int
    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[WrittenChunk, int]] = field(default_factory=list)

    def line(self) -> bytes:
        """In the manifest."""
        chunks = [chunk_text(file, c.begin, c.end, c.row.place, c.digests) for c, file in self.chunks]
        return tensor_line(self.dtype, self.shape, chunks)


class Merged:
    """All ranks' accounts, merged.

    Meshes that hold different lists of tensors, as pipeline stages do, may hold some tensors alike: both ends of a
    pipeline have tied embeddings. Of these the first mesh's are the checkpoint's, and the others must be equal to it.

    Raises:
        CheckpointError: Chunks of a tensor overlap or leave a gap: not all ranks that hold it wrote, or several did;
            meshes hold different tensors by one name; or ranks tie tensors in different ways.
    """

    def __init__(self, accounts: list[Account]) -> None:
        _check_agreement(accounts)
        self._accounts = accounts
        self._files: list[FileEntry] = []
        self._state_file: int | None = None
        self._meshes: dict[tuple[int, ...], int] = {}
        self._tensors: dict[str, dict[str, _Held]] = {}
        self._again: dict[tuple[str, str, int], _Held] = {}
        """What further meshes hold of tensors that an earlier one has, by section, name and mesh."""
        self._aliases: dict[str, dict[str, str]] = {}
        self._pairs: list[tuple[str, tuple[str, _Held], tuple[str, _Held]]] = []
        """What must be equal."""
        mesh_of = {}
        for account in accounts:
            mesh = mesh_of[account.rank] = self._meshes.setdefault(account.mesh_ranks, len(self._meshes))
            self._add(account, mesh)
        self._pairs += [
            (section, (name, self._tensors[section][name]), (name, held))
            for (section, name, _), held in self._again.items()
        ]
        for account in accounts:  # once all tensors are known: a name may be tied on one mesh and plain on another
            self._add_aliases(account, mesh_of[account.rank])
        for section in ("model", "optimizer"):
            for name, held in self._tensors.get(section, {}).items():
                _check_coverage(name, held)
        for (_, name, _), held in self._again.items():
            _check_coverage(name, held)

    def _add(self, account: Account, mesh: int) -> None:
        if account.state_file is not None:
            self._state_file = len(self._files)
            self._files.append(account.state_file)
        for section, of_section in account.written.items():
            title = f"rank {account.rank}" if section == "rank" else section
            tensors = self._tensors.setdefault(title, {})
            for written in of_section:
                index = len(self._files)
                self._files.append(written.file)
                for chunk in written.chunks():
                    name, dtype, shape = chunk.row[:3]
                    held = tensors.get(name)
                    if held is None:
                        held = tensors[name] = _Held(mesh, dtype, shape)
                    elif held.mesh != mesh:
                        held = self._again.setdefault((title, name, mesh), _Held(mesh, dtype, shape))
                    if held.dtype != dtype or held.shape != shape:
                        raise CheckpointError(
                            f"{name!r} is {dtype} {shape} on rank {account.rank}, and {held.dtype} {held.shape} on a"
                            " rank before it: ranks that hold one tensor must agree."
                        )
                    held.chunks.append((chunk, index))

    def _add_aliases(self, account: Account, mesh: int) -> None:
        for section, aliases in account.aliases.items():
            tensors = self._tensors.setdefault(section, {})
            for name, target in aliases.items():
                own = self._again.get((section, target, mesh), tensors.get(target))
                if own is None:
                    raise CheckpointError(
                        f"{name!r} shares its memory with {target!r} on rank {account.rank}, and no rank has written"
                        f" {target!r}: tensors that share memory must do so on all ranks that hold them, and be listed"
                        " in the same order there."
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

    def unsettled(self) -> list[Name]:
        """The tensors that meshes cut into other chunks, so that digests don't tell whether they hold them alike.

        Raises:
            CheckpointError: One is not alike.
        """
        unsettled: dict[Name, None] = {}
        for section, (name, first), (other_name, other) in self._pairs:
            if first.dtype != other.dtype or first.shape != other.shape:
                raise self._differ(name, first, other)
            mine, theirs = _digests(first), _digests(other)
            known = [box for box in mine.keys() & theirs.keys() if mine[box] and theirs[box]]
            if any(mine[box] != theirs[box] for box in known):
                raise self._differ(name, first, other)
            if not len(known) == len(mine) == len(theirs):
                unsettled |= {(section, name): None, (section, other_name): None}
        return list(unsettled)

    def settle(self, sums: list[Sums]) -> None:
        """Compare the tensors that are unsettled by sums of their content, each rank's of what it wrote.

        Raises:
            CheckpointError: One is not alike.
        """
        totals: dict[tuple[str, str, int], int] = {}
        for account, own in zip(self._accounts, sums, strict=True):
            mesh = self._meshes[account.mesh_ranks]
            for (section, name), value in own.items():
                totals[section, name, mesh] = totals.get((section, name, mesh), 0) + value
        for section, (name, first), (other_name, other) in self._pairs:
            mine, theirs = totals.get((section, name, first.mesh)), totals.get((section, other_name, other.mesh))
            if mine is not None and theirs is not None and (mine - theirs) % 2**64:
                raise self._differ(name, first, other)

    def _differ(self, name: str, first: _Held, other: _Held) -> CheckpointError:
        ranks = {number: _short(members) for members, number in self._meshes.items()}
        what = "content" if (first.dtype, first.shape) == (other.dtype, other.shape) else "dtype or shape"
        return CheckpointError(
            f"{name!r} is on the ranks {ranks[first.mesh]} and on the ranks {ranks[other.mesh]}, which hold different"
            f" lists of tensors, and differs in {what}: one of the two would be lost. Give different tensors different"
            " names, as by numbering layers through all pipeline stages; tied tensors must be equal everywhere."
        )

    def manifest(self, *, attempt: str, layout: Any, writer: str, digests: bool) -> Manifest:
        sections: dict[str, dict[str, bytes]] = {"model": {}, "optimizer": {}, "trainer": {}}
        ranks: dict[str, Any] = {}
        for title, tensors in self._tensors.items():
            lines = {name: held.line() for name, held in tensors.items()}
            if title in sections:
                sections[title] = lines
            else:
                ranks[title.removeprefix("rank ")] = {name: json.loads(line) for name, line in lines.items()}
        for section, aliases in self._aliases.items():
            sections[section].update({name: dump({"same_as": of}).encode() for name, of in aliases.items()})
        return Manifest(
            attempt=attempt,
            files=self._files,
            layout=layout,
            world_size=len(self._accounts),
            writer=writer,
            block_bytes=BLOCK_BYTES if digests else 0,
            state_file=self._state_file,
            raw_sections={**{title: Lines(lines) for title, lines in sections.items()}, "ranks": ranks},
        )


def _digests(held: _Held) -> dict[str, str]:
    """Of the chunks' blocks, by the chunks' places."""
    return {chunk.row.place: chunk.digests for chunk, _ in held.chunks if chunk.begin < chunk.end}


def _check_agreement(accounts: list[Account]) -> None:
    """Ranks that share the writing of their tensors must hold the same ones: else some would be written by no one."""
    by_rank = {account.rank: account for account in accounts}
    meshes: set[tuple[int, ...]] = set()
    for account in accounts:
        # One rank of a mesh is compared with all of it, and the others with its first: a mesh may have thousands.
        members = account.mesh_ranks[:1] if account.mesh_ranks in meshes else account.mesh_ranks
        meshes.add(account.mesh_ranks)
        for rank in members:
            other = by_rank.get(rank)
            if other is None:
                raise CheckpointError(
                    f"Rank {account.rank} shares its tensors with rank {rank}, which isn't saving: save on all ranks of"
                    " the mesh."
                )
            if other.mesh_ranks != account.mesh_ranks or other.fingerprint != account.fingerprint:
                raise CheckpointError(
                    f"Rank {account.rank} ({account.fingerprint[0]} tensors) was to hold the same tensors as rank"
                    f" {rank} ({other.fingerprint[0]} tensors), and they differ in names, dtypes or shapes. Where ranks"
                    " hold different tensors, as pipeline stages do, pass mesh=, the mesh of those that hold the same."
                )
        if account.mesh_ranks:
            _check_contents(account, by_rank[account.mesh_ranks[0]])


def _check_contents(account: Account, other: Account) -> None:
    """What two ranks hold alike, and each writes a part of, must be the same."""
    if (account.contents, account.replicated) == (other.contents, other.replicated):
        return
    if account.replicated != other.replicated:
        raise CheckpointError(
            f"Rank {account.rank} and rank {other.rank} hold the same tensors, but not the same of them whole: shard"
            " them alike on all ranks of the mesh."
        )
    names = account.replicated.decode(errors="surrogatepass").split("\n")
    width = FINGERPRINT_BYTES
    for number, name in enumerate(names):
        if account.contents[number * width :][:width] != other.contents[number * width :][:width]:
            raise CheckpointError(
                f"{name!r} isn't sharded, and differs between rank {min(account.rank, other.rank)} and rank"
                f" {max(account.rank, other.rank)}: of which it should be saved isn't known. Give all ranks the same,"
                " as by a broadcast before saving, or pass what belongs to each rank in rank_state=."
            )


def _check_coverage(name: str, held: _Held) -> None:
    fault = _coverage_fault(held.shape, tuple((chunk.row.offsets, chunk.row.sizes) for chunk, _ in held.chunks))
    if fault is not None:
        raise CheckpointError(
            f"The ranks' parts of {name!r} of shape {held.shape} don't make up the tensor: {fault}. Either a"
            " rank that holds a part of it isn't saving, or not all ranks that save together hold the same tensors (as"
            " with pipeline stages): then pass mesh=, the mesh of the ranks that do."
        )


@lru_cache(maxsize=LAYOUTS_KEPT)
def _coverage_fault(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> str | None:
    return coverage_fault(shape, [Box(*box) for box in boxes])


def _short(ranks: Iterable[int]) -> str:
    listed = [*ranks]
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:4]))}, … {listed[-1]}] ({len(listed)})"
