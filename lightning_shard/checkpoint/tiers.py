"""Two tiers: a checkpoint is committed on a local disk first, then carried to the store that it is meant for.

The local copy is a checkpoint as any other, in a folder whose name is made of the path that it is carried to. It is
carried as it is, file by file, the manifest last, so that both have one attempt: by that they are known to be the same.

All ranks must see one local folder. A rank needs files that other ranks wrote, even on the layout that saved: the
trainer's state, and parts of tensors that several ranks hold alike. On disks that each machine has for itself, a local
copy could not be loaded.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lightning_shard.checkpoint.catalog import commits, committed_at, names_in, step_of
from lightning_shard.checkpoint.folder import Earlier, remove
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, check_digest, digest
from lightning_shard.checkpoint.format.manifest import OWN_FILE, Chunk, FileEntry
from lightning_shard.checkpoint.loading.open import read, read_together
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Failure, Ranks, exchange, together
from lightning_shard.checkpoint.saving.commit import (
    check_files,
    check_own_files,
    commit,
    failed_commit,
    look_before_saving,
)
from lightning_shard.checkpoint.saving.save import abandon, raise_cause
from lightning_shard.checkpoint.store import Buffer, LocalStore, as_path, open_store
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
)

KEPT = 2
"""Of the local copies in one folder."""


@dataclass(frozen=True)
class LocalTier:
    """The local folder, and the options of the stores that its checkpoints are carried to."""

    root: str
    storage_options: dict[str, Any] = field(repr=False)  # they may hold secrets

    @classmethod
    def at(cls, path: str | os.PathLike[str], storage_options: dict[str, Any]) -> LocalTier:
        """Raises ConfigurationError if the path isn't one of the local disk."""
        store = open_store(path)
        if not isinstance(store, LocalStore):
            raise ConfigurationError(f"local ({as_path(path)}) must be a folder of the local disk.")
        return cls(os.path.abspath(store.root), storage_options)

    def folder(self, path: str) -> str:
        """Where the copies of the checkpoints in a folder lie: of no other folder, nor of another store's."""
        store = open_store(path, self.storage_options)
        place = os.path.realpath(store.root) if isinstance(store, LocalStore) else as_path(path)
        client = self.storage_options.get("client_kwargs")
        endpoint = self.storage_options.get("endpoint_url") or (client or {}).get("endpoint_url")
        return os.path.join(self.root, f"{posixpath.basename(place)}-{digest(f'{place} {endpoint}'.encode())[:12]}")

    def copy_of(self, path: str) -> str:
        """Where the local copy of a checkpoint lies."""
        store = open_store(path, self.storage_options)
        folder, name = os.path.split(os.path.abspath(store.root) if isinstance(store, LocalStore) else as_path(path))
        return os.path.join(self.folder(folder), name)

    def check_shared(self, ranks: Ranks) -> None:
        """See whether all ranks have one folder there; a collective call.

        Raises:
            ConfigurationError: They haven't.
        """

        def leave_a_file() -> str:
            name = f".seen-by-all-{secrets.token_hex(4)}"
            os.makedirs(self.root, exist_ok=True)
            with open(os.path.join(self.root, name), "x"):
                return name

        name = together(ranks, lambda: None, lambda _: leave_a_file())
        path = os.path.join(self.root, name)
        try:
            missed = together(
                ranks,
                lambda: (ranks.rank, os.path.exists(path)),
                lambda seen: [rank for rank, found in seen if not found],
            )
        finally:
            if ranks.first:
                os.unlink(path)
        if missed:
            raise ConfigurationError(
                f"local ({self.root}) must be one folder for all ranks, and rank {missed[0]} doesn't see what rank"
                f" {ranks.members[0]} wrote there: each machine has a disk of its own, from which the other ranks'"
                " files couldn't be read again. Leave local out, or name a folder that all machines mount."
            )

    # -- saving -------------------------------------------------------------------------------------------------------

    def carry(self, path: str, ranks: Ranks, *, fsync: bool = True) -> None:
        """Bring a local copy that has just been committed to its store; a collective call of the ranks that saved it.

        Each rank carries the files that it wrote, and checks every block on the way. If any rank fails, every rank
        raises, nothing is committed, and the local copy stays.

        Raises:
            CheckpointConflictError: Another save has put its checkpoint there meanwhile. That one stays.
            CheckpointError: A rank couldn't read or write; the copy is damaged.
        """
        if ranks.first:
            self._prune(path)
        checkpoint = read_together(self.copy_of(path), group=ranks.group)
        manifest, began_s = checkpoint.manifest, time.monotonic()
        store = open_store(path, self.storage_options)
        earlier: Earlier = together(ranks, lambda: None, lambda _: look_before_saving(store))
        if earlier.files.issuperset(file.path for file in manifest.files):
            return  # it is there already
        own_files = [file for file in manifest.files if _carrier(file, ranks) == ranks.rank]
        fault: list[BaseException] = []

        def carry_own() -> list[FileEntry]:
            for file, chunks in _with_chunks(checkpoint, own_files):
                store.write(file.path, _checked(checkpoint, file, chunks), file.bytes, durable=fsync)
            if fsync:
                store.sync(file.path for file in own_files)
            check_own_files(store, own_files)
            return own_files

        def conclude(carried: list[list[FileEntry]]) -> Failure | None:
            check_files(store, {"": [file for files in carried for file in files]}, "", began_s)
            try:
                commit(store, manifest, earlier, durable=fsync)
            except BaseException as error:
                fault.append(error)
                return failed_commit(store, manifest.attempt, ranks.rank, error)
            return None

        own, outcome = exchange(ranks, carry_own, conclude)
        if isinstance(outcome, Failure):
            if not outcome.files_stay:
                abandon(store, [file.path for file in own_files])
            raise_cause(own or next(iter(fault), None), outcome, ranks.rank, path)

    def _prune(self, path: str) -> None:
        """Remove local copies but for the newest; a failure to is no failure of the checkpoint."""
        folder = os.path.dirname(self.copy_of(path))
        with contextlib.suppress(Exception):
            kept = {os.path.basename(self.copy_of(path)), *(name for _, name in commits(folder)[-KEPT:])}
            for name in names_in(folder):
                if name not in kept:  # of those that are no checkpoints, what is old goes
                    remove(os.path.join(folder, name))

    # -- loading ------------------------------------------------------------------------------------------------------

    def choose(self, path: str, ranks: Ranks) -> Choice:
        """Where to read a checkpoint from; a collective call.

        The local copy, if it is whole for every rank, and either the same, or newer, or the only one.
        """
        copy = self.copy_of(path)

        def decide(attempts: list[str]) -> Choice:
            if not attempts[0] or len(set(attempts)) > 1:
                return Choice(path, False, "no whole local copy is seen by all ranks")
            if (there := _sound(path, self.storage_options)) is None:
                return Choice(copy, True, f"a local copy; there is no whole checkpoint at {path}")
            if there.manifest.attempt == attempts[0]:
                return Choice(copy, True, f"the local copy of {path}")
            if _is_newer(copy, there):
                return Choice(copy, True, f"a local copy, newer than {path}")
            return Choice(path, False, "the local copy is of another save, and not a newer one")

        return together(ranks, lambda: whole_attempt(copy), decide)

    def newest(
        self, folder: str, found: str | None, which: Callable[[str], bool], order: Callable[[tuple[datetime, str]], Any]
    ) -> tuple[datetime, str] | None:
        """The newest whole local copy of a folder's checkpoints, with the time of its commit, if it is newer than the
        one that was found in the folder itself. Not collective.

        Args:
            found: Its name.
            which: Asked about each name.
            order: Of commits, as (time, name); the last is the newest.
        """
        copies = self.folder(folder)
        here = [one for one in commits(copies, None, which) if whole_attempt(os.path.join(copies, one[1]))]
        if not here:
            return None
        newest = max(here, key=order)
        there = _sound(posixpath.join(folder, found), self.storage_options) if found is not None else None
        return newest if there is None or _is_newer(os.path.join(copies, newest[1]), there) else None

    def remove(self, path: str) -> None:
        """Remove the local copy of a checkpoint, if there is one."""
        remove(self.copy_of(path))


@dataclass(frozen=True)
class Choice:
    """A path to read from, and what is said of it."""

    path: str
    local: bool
    why: str


def whole_attempt(path: str) -> str:
    """The attempt of a local checkpoint whose files are all there, by their sizes; empty if it isn't one."""
    try:
        checkpoint = read(path)
        whole = all(checkpoint.store.size(file.path) == file.bytes for file in checkpoint.manifest.files)
    except (CheckpointError, OSError):
        return ""
    return checkpoint.manifest.attempt if whole else ""


def _sound(path: str, storage_options: dict[str, Any]) -> Checkpoint | None:
    """What is at a path; None where that is nothing, or has a damaged manifest. Other errors are the caller's."""
    try:
        return read(path, storage_options=storage_options)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


def _is_newer(copy: str, there: Checkpoint) -> bool:
    """Whether a local copy was committed later, and is of a later step: in doubt, it isn't.

    Clocks of two machines may differ, and a copy of an earlier run at this path may be of a later step.
    """
    here = read(copy)
    mine, theirs = committed_at(here.store), committed_at(there.store)
    if mine is None or theirs is None or mine <= theirs:
        return False
    try:
        step, other = step_of(here.state_json()), step_of(there.state_json())
    except CorruptCheckpointError:
        return False
    return step is not None and other is not None and step > other


def _carrier(file: FileEntry, ranks: Ranks) -> int:
    """The rank that wrote a file, by its name; the first one for the trainer's state."""
    own = OWN_FILE.fullmatch(file.path)
    name = own[2].removeprefix("rank-") if own else ""
    rank = int(name) if name.isdigit() else ranks.members[0]
    return rank if rank in ranks.members else ranks.members[0]


def _with_chunks(checkpoint: Checkpoint, files: list[FileEntry]) -> Iterator[tuple[FileEntry, list[tuple[str, Chunk]]]]:
    """Files, each with its chunks and their tensors' names, in the order of their bytes."""
    own = set(files)
    chunks: dict[int, list[tuple[str, Chunk]]] = {
        index: [] for index, file in enumerate(checkpoint.manifest.files) if file in own
    }
    for section in checkpoint.manifest.sections().values():
        for name, entry in section.items():
            if section.alias_of(name) is None:
                for chunk in entry.chunks:
                    if chunk.file in chunks:
                        chunks[chunk.file].append((name, chunk))
    for index, of_file in chunks.items():
        yield checkpoint.manifest.files[index], sorted(of_file, key=lambda one: (one[1].begin, one[1].end))


def _checked(checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]) -> Iterator[Buffer]:
    """A file's bytes in order, by blocks, each of which is checked; its memory is used again for the next."""
    memory = memoryview(bytearray())
    with checkpoint.store.reading(file.path) as read_into:
        for name, begin, end, expected in _blocks(checkpoint, file, chunks):
            if memory.nbytes < end - begin:
                memory = memoryview(bytearray(end - begin))
            block = memory[: end - begin]
            read_into([(begin, block)])
            if expected:
                check_digest(digest(block), expected, name, begin, end, f"{checkpoint.path}/{file.path}")
            yield block


def _blocks(
    checkpoint: Checkpoint, file: FileEntry, chunks: list[tuple[str, Chunk]]
) -> Iterator[tuple[str, int, int, str | None]]:
    """All of a file's bytes: what they are a part of, begin, end, and their digest where they have one."""
    at = file.header_bytes or file.bytes
    yield "header" if file.header_bytes else "state", 0, at, file.digest
    block_bytes = checkpoint.manifest.block_bytes or BLOCK_BYTES
    for name, chunk in chunks:
        if chunk.begin != at:
            raise CorruptCheckpointError(
                f"{checkpoint.path}/{file.path}: the chunk of {name!r} begins at byte {chunk.begin:,}, and the one"
                f" before it ends at {at:,}: use another checkpoint."
            )
        for number, begin in enumerate(range(chunk.begin, chunk.end, block_bytes)):
            yield name, begin, min(begin + block_bytes, chunk.end), chunk.block_digest(number)
        at = chunk.end
    if at != file.bytes:
        raise CorruptCheckpointError(
            f"{checkpoint.path}/{file.path}: its tensors end at byte {at:,} of {file.bytes:,}: use another checkpoint."
        )
