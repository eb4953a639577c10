"""Two tiers: a checkpoint is committed on local disks first, then carried to the store that it is meant for.

The local copy is a checkpoint as any other, in a folder whose name is made of the path that it is carried to. Both have
one attempt: by that they are known to be the same.

Machines may have a disk each, or mount one folder; which it is needn't be said. Each rank writes its files to its own
machine's folder, and the manifest is put beside them on every machine. A rank carries what it wrote, and needs no
other's files for that. Loading does (the trainer's state, parts of tensors that ranks hold alike): a copy is read in
place only if every rank sees all of its files. One that lies on several disks is carried to its store, and read there.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from lightning_shard.checkpoint.carry import attempt_at, carry, check
from lightning_shard.checkpoint.catalog import commits, committed_at, names_in, step_of
from lightning_shard.checkpoint.folder import look, remove
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE, FileEntry
from lightning_shard.checkpoint.loading.open import Found, open_found, read
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Failure, Ranks, all_or_none, exchange, together
from lightning_shard.checkpoint.saving.commit import commit
from lightning_shard.checkpoint.store import LocalStore, as_path, open_store
from lightning_shard.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
)

KEPT = 2
"""Of the local copies in one folder."""

LONG_AGO = datetime.min.replace(tzinfo=UTC)
Commit = tuple[datetime, str]
"""When, and the checkpoint's name."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is to be read.

    Attributes:
        local: Whether ``path`` is that of the local copy.
        why: What is said of it.
        worse: Whether a local copy that may have been newer had to be passed over.
    """

    path: str
    local: bool
    why: str
    worse: bool = False


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

    # -- saving -------------------------------------------------------------------------------------------------------

    def carry(self, path: str, ranks: Ranks, *, fsync: bool) -> None:
        """Bring a local copy that has just been committed to its store; a collective call of the ranks that saved it.

        If any rank fails, every rank raises, nothing is committed in the store, and the copy stays.

        Raises:
            CheckpointConflictError: Another save has put its checkpoint there meanwhile. That one stays.
            CheckpointError: A rank couldn't read or write; the copy is damaged.
        """
        checkpoint = _open_together(self.copy_of(path), ranks, ranks.members[0])
        with all_or_none(ranks.group):
            if _put_manifest_here(checkpoint, fsync) or ranks.first:
                self._prune(path)
        own_files = [file for file in checkpoint.manifest.files if _writer(file, ranks) == ranks.rank]
        carry(checkpoint, path, own_files, ranks, storage_options=self.storage_options, fsync=fsync)

    def _prune(self, path: str) -> None:
        """Remove this machine's copies but for the newest; a failure to is no failure of the checkpoint."""
        folder = os.path.dirname(self.copy_of(path))
        with contextlib.suppress(Exception):
            kept = {os.path.basename(self.copy_of(path)), *(name for _, name in commits(folder)[-KEPT:])}
            for name in names_in(folder):
                if name not in kept:  # of those that are no checkpoints, what is old goes
                    remove(os.path.join(folder, name))

    def remove(self, path: str) -> None:
        """Remove this machine's copy of a checkpoint, if there is one."""
        remove(self.copy_of(path))

    # -- loading ------------------------------------------------------------------------------------------------------

    def source(self, path: str, ranks: Ranks, *, fsync: bool) -> Source:
        """Where to read a checkpoint; a collective call.

        That is the local copy if it is the same as what is at the path, or newer, or the only one. It is looked through
        first, each rank reading some of the files, and where it isn't whole the store's is taken. If it lies on several
        machines' disks, and is newer, it is carried to the path, and read there.

        Raises:
            CorruptCheckpointError: The copy is damaged, and there is no other.
            CheckpointError: It couldn't be carried.
        """
        seen = together(ranks, partial(_copy_at, self.copy_of(path), ranks.rank), partial(self._look, path))
        if seen.copy is None:
            return Source(path, False, seen.why, seen.worse)
        checkpoint = _open_together(self.copy_of(path), ranks, seen.copy.rank)
        files = checkpoint.manifest.files
        everywhere, readers = together(ranks, partial(_seen, checkpoint), partial(_readers, ranks))
        if None in readers:
            return _instead(
                path, seen, f"{checkpoint.path}/{files[readers.index(None)].path} of it is gone or was cut off"
            )
        if seen.same and not everywhere:
            return Source(path, False, "its local copy lies on several machines' disks")
        own_files = [file for file, reader in zip(files, readers, strict=True) if reader == ranks.rank]
        own, damage = exchange(ranks, lambda: check(checkpoint, own_files), lambda _: None)
        if isinstance(damage, Failure):
            if own is not None and not isinstance(own, CorruptCheckpointError):
                raise own
            if damage.kind != CorruptCheckpointError.__name__:
                damage.raise_here(ranks.rank)
            return _instead(path, seen, damage.message)
        if everywhere:
            return Source(checkpoint.path, True, seen.why)
        carry(checkpoint, path, own_files, ranks, storage_options=self.storage_options, fsync=fsync, again=True)
        return Source(path, False, f"{seen.why}, which lay on several machines' disks, and has been carried there now")

    def _look(self, path: str, copies: list[_Copy]) -> _Look:
        """Compare the ranks' copies, of which the newest counts, with what is in the store."""
        copy = max((copy for copy in copies if copy.attempt), key=lambda copy: copy.committed, default=None)
        if copy is None:
            fault = next((copy.fault for copy in copies if copy.fault), None)
            why = f"its local copy can't be read ({fault})" if fault else "it has no local copy"
            return _Look(why, worse=fault is not None)
        there = _sound(path, self.storage_options)
        if there is None:
            return _Look(f"a local copy; there is no whole checkpoint at {path}", copy)
        if there.manifest.attempt == copy.attempt:
            return _Look(f"the local copy of {path}", copy, same=True, other=True)
        steps = [one.step for one in copies if one.attempt == copy.attempt and one.step is not None]
        if _is_newer(copy.committed, next(iter(steps), None), there):
            return _Look(f"a local copy, newer than {path}", copy, other=True)
        if not steps and _is_later(copy.committed, there):
            return _Look("the local copy was committed later, but can't be read to see its step", worse=True)
        return _Look("the local copy is of another save, and not a newer one")

    def newest(
        self, folder: str, found: str | None, which: Callable[[str], bool], order: Callable[[Commit], Any]
    ) -> Commit | None:
        """The newest of a folder's checkpoints that has a local copy, if that is newer than the one that was found in
        the folder itself. Not collective: it is about what this machine has.

        One of that same name isn't, as :meth:`source` compares these. Where the folder has none at all, one of which
        this machine has a part counts, too.

        Args:
            found: Its name.
            which: Asked about each name.
            order: Of commits; the last is the newest.
        """
        copies = self.folder(folder)
        here = sorted(commits(copies, None, which), key=order)
        opened = [(one, _sound(os.path.join(copies, one[1]), {})) for one in here]
        sound = [(one, copy) for one, copy in opened if copy is not None]
        whole = [(one, copy) for one, copy in sound if all(_seen(copy))]
        there = _sound(posixpath.join(folder, found), self.storage_options) if found is not None else None
        for one, copy in reversed(whole):
            if there is not None and (one[1] == found or not _is_newer(one[0], _step(copy), there)):
                return None
            if _is_undamaged(copy):  # else the path would lead nowhere: the store hasn't this one
                return one
        return sound[-1][0] if there is None and sound else None


@dataclass(frozen=True)
class _Copy:
    """What a rank sees of a local copy."""

    rank: int
    attempt: str = ""
    committed: datetime = LONG_AGO
    step: int | None = None
    """None also where the trainer's state lies on another machine's disk."""
    fault: str = ""
    """Why it can't be read."""


@dataclass(frozen=True)
class _Look:
    """What the first rank has made of it.

    Attributes:
        why: Of what is to be read.
        copy: The one to be read, if it is whole.
        same: Whether the store has the same attempt.
        other: Whether the store has one that can be read instead.
        worse: As :class:`Source` has it.
    """

    why: str
    copy: _Copy | None = None
    same: bool = False
    other: bool = False
    worse: bool = False


def _copy_at(path: str, rank: int) -> _Copy:
    try:
        copy = read(path)
        committed = committed_at(copy.store)
    except CheckpointNotFoundError:
        return _Copy(rank)
    except (CheckpointError, OSError) as error:
        return _Copy(rank, fault=str(error))
    return _Copy(rank, copy.manifest.attempt, committed or LONG_AGO, _step(copy))


def _open_together(copy: str, ranks: Ranks, holder: int) -> Checkpoint:
    """A copy, each rank's files in its own place, by the manifest that one rank has; a collective call."""

    def manifest() -> bytes | None:
        return open_store(copy).read(MANIFEST_NAME) if ranks.rank == holder else None

    data: bytes = together(ranks, manifest, lambda found: next(one for one in found if one is not None))
    return open_found(copy, None, True, Found(copy, data))


def _instead(path: str, seen: _Look, fault: str) -> Source:
    """What is in the store, where the copy is damaged."""
    if not seen.other:
        raise CorruptCheckpointError(
            f"The local copy of {path} is damaged, and no checkpoint is there ({fault}): resume from another one, or"
            " remove the copy."
        )
    return Source(path, False, f"its local copy is damaged ({fault})", worse=not seen.same)


def _put_manifest_here(checkpoint: Checkpoint, fsync: bool) -> bool:
    """Put it beside the files of this rank, where the first rank has put it on another disk; whether this rank did."""
    store, manifest = checkpoint.store, checkpoint.manifest
    if attempt_at(store) == manifest.attempt:
        return False
    try:
        commit(store, manifest, look(store), durable=fsync)
    except CheckpointConflictError:
        return False  # another rank of this machine came first
    return True


def _writer(file: FileEntry, ranks: Ranks) -> int:
    """The rank that wrote a file, by its name; the first one for the trainer's state."""
    own = OWN_FILE.fullmatch(file.path)
    name = own[2].removeprefix("rank-") if own else ""
    rank = int(name) if name.isdigit() else ranks.members[0]
    return rank if rank in ranks.members else ranks.members[0]


def _seen(checkpoint: Checkpoint) -> list[bool]:
    """Of each file, whether it is there for this rank, by its size."""

    def is_there(file: FileEntry) -> bool:
        try:
            return checkpoint.store.size(file.path) == file.bytes
        except OSError:
            return False

    return [is_there(file) for file in checkpoint.manifest.files]


def _readers(ranks: Ranks, seen: list[list[bool]]) -> tuple[bool, list[int | None]]:
    """Whether every rank sees all files; and for each file one of the ranks that see it, in turn."""
    readers: list[int | None] = []
    for number, by_rank in enumerate(zip(*seen)):
        able = [rank for rank, is_there in zip(ranks.members, by_rank) if is_there]
        readers.append(able[number % len(able)] if able else None)
    return all(map(all, seen)), readers


def _is_undamaged(checkpoint: Checkpoint) -> bool:
    try:
        check(checkpoint, checkpoint.manifest.files)
    except CorruptCheckpointError:
        return False
    return True


def _sound(path: str, storage_options: dict[str, Any]) -> Checkpoint | None:
    """What is at a path; None where that is nothing, or has a damaged manifest. Other errors are the caller's."""
    try:
        return read(path, storage_options=storage_options)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


def _step(checkpoint: Checkpoint) -> int | None:
    try:
        return step_of(checkpoint.state_json())
    except (CheckpointError, OSError):
        return None


def _is_newer(committed: datetime, step: int | None, there: Checkpoint) -> bool:
    """Whether a local copy was committed later, and is of a later step: in doubt, it isn't.

    Clocks of two machines may differ, and a copy of an earlier run at this path may be of a later step.
    """
    if step is None or not _is_later(committed, there):
        return False
    try:
        other = step_of(there.state_json())
    except CorruptCheckpointError:
        return True  # the store's can't be loaded
    return other is not None and step > other


def _is_later(committed: datetime, there: Checkpoint) -> bool:
    theirs = committed_at(there.store)
    return theirs is not None and committed > theirs
