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

from lightning_shard.checkpoint.carry import attempt_at, carry, damage
from lightning_shard.checkpoint.catalog import commits, committed_at, names_in, step_of
from lightning_shard.checkpoint.folder import look, remove
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE, FileEntry
from lightning_shard.checkpoint.loading.open import Found, open_found, read
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Ranks, all_or_none, together
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
CARRIED = ".carried"
"""A folder beside the copies. A file in it has a copy's name, and the attempt that was carried from there."""

LONG_AGO = datetime.min.replace(tzinfo=UTC)
Commit = tuple[datetime, str]
"""When, and the checkpoint's name."""


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is to be read.

    Attributes:
        local: Whether ``path`` is that of the local copy.
        why: What is said of it.
        worse: Whether a local copy that may be newer had to be passed over, or is all that there is of a checkpoint.
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
        place = open_store(path, self.storage_options).place()
        return os.path.join(self.root, f"{posixpath.basename(place[0])}-{digest(repr(place).encode())[:12]}")

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
        _note_carried(checkpoint)

    def _prune(self, path: str) -> None:
        """Remove this machine's copies but for the newest; a failure to is no failure of the checkpoint."""
        folder, name = os.path.split(self.copy_of(path))
        others: list[str] = []
        with contextlib.suppress(Exception):
            kept = {CARRIED, name, *(newest for _, newest in commits(folder)[-KEPT:])}
            others = [other for other in names_in(folder) if other not in kept]
        for other in others:
            with contextlib.suppress(Exception):
                if not self._is_needed(posixpath.join(posixpath.dirname(as_path(path)), other)):
                    self._remove(os.path.join(folder, other))

    def _is_needed(self, path: str) -> bool:
        """Whether a copy may be all that there is of a checkpoint: it wasn't carried, nor a newer one put there.

        What has been carried isn't, also where it was removed from there since.
        """
        copy = _sound(self.copy_of(path), {})
        if copy is None or _was_carried(copy):  # of those that are no checkpoints, what is old goes
            return False
        there = _sound(path, self.storage_options)
        return there is None or (there.manifest.attempt != copy.manifest.attempt and not _is_older(copy, there))

    def remove(self, path: str) -> None:
        """Remove this machine's copy of a checkpoint, if there is one."""
        self._remove(self.copy_of(path))

    @staticmethod
    def _remove(copy: str) -> None:
        remove(copy)
        with contextlib.suppress(OSError):
            os.unlink(_note_of(copy))

    # -- loading ------------------------------------------------------------------------------------------------------

    def source(self, path: str, ranks: Ranks, *, fsync: bool) -> Source:
        """Where to read a checkpoint; a collective call.

        That is the local copy if it is the same as what is at the path, or newer, or the only one. It is looked through
        first, each rank reading some of the files, and where it isn't whole the store's is taken. Then it is carried to
        the path, if it isn't there. One that all ranks see is read in place, also where carrying fails; one that lies
        on several machines' disks is read at the path.

        Raises:
            CorruptCheckpointError: The copy is damaged, and there is no other.
            CheckpointError: It couldn't be carried from several machines' disks.
        """
        seen = together(ranks, partial(self._copy_at, path, ranks.rank), partial(self._look, path))
        if seen.copy is None:
            return Source(path, False, seen.why, seen.worse)
        checkpoint = _open_together(self.copy_of(path), ranks, seen.copy.rank)
        files = checkpoint.manifest.files
        everywhere, readers = together(ranks, partial(_seen, checkpoint), partial(_readers, ranks))
        if None in readers:
            fault = f"{checkpoint.path}/{files[readers.index(None)].path} of it is gone or was cut off"
            if seen.copy.carried and not seen.other:  # another machine's part was removed, as the checkpoint was
                return Source(path, False, f"it was carried there, and its local copy isn't whole ({fault})", True)
            return _instead(path, seen, fault)
        if seen.same and not everywhere:
            return Source(path, False, "its local copy lies on several machines' disks")
        own_files = [file for file, reader in zip(files, readers, strict=True) if reader == ranks.rank]
        fault = together(ranks, partial(damage, checkpoint, own_files), lambda faults: next(filter(None, faults), ""))
        if fault:
            return _instead(path, seen, fault)
        if seen.same or (ranks.alone and not Ranks.of().alone):  # ranks that load each for itself don't carry
            return Source(checkpoint.path, True, seen.why)
        try:
            carry(checkpoint, path, own_files, ranks, storage_options=self.storage_options, fsync=fsync)
        except BaseException as error:  # it is raised by all
            (stops,) = ranks.any(not (everywhere and isinstance(error, Exception)))
            if stops:
                raise
            return Source(checkpoint.path, True, f"{seen.why}; it couldn't be carried there ({error})", worse=True)
        _note_carried(checkpoint)
        if everywhere:
            return Source(checkpoint.path, True, f"{seen.why}, and carried there now")
        return Source(path, False, f"{seen.why}, which lay on several machines' disks, and has been carried there now")

    def _copy_at(self, path: str, rank: int) -> _Copy:
        try:
            copy = read(self.copy_of(path))
            committed = committed_at(copy.store)
        except CheckpointNotFoundError:
            return _Copy(rank)
        except (CheckpointError, OSError) as error:
            return _Copy(rank, fault=str(error))
        attempt, digests, carried = copy.manifest.attempt, _has_digests(copy), _was_carried(copy)
        return _Copy(rank, attempt, committed or LONG_AGO, _step(copy), digests, carried)

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
        same = there.manifest.attempt == copy.attempt
        if not copy.digests:
            return _Look("the local copy has no digests, and so isn't known to be whole", worse=not same)
        if same:
            return _Look(f"the local copy of {path}", copy, same=True, other=True)
        step = next((one.step for one in copies if one.attempt == copy.attempt and one.step is not None), None)
        committed_later, of_later_step = _is_later(copy.committed, there), _is_of_later_step(step, there)
        if committed_later and of_later_step:
            return _Look(f"a local copy, newer than {path}", copy, other=True)
        if committed_later and step is None:
            return _Look("the local copy was committed later, but can't be read to see its step", worse=True)
        if of_later_step:
            return _Look(
                f"the local copy is of a later step ({step}), but was committed earlier: it is an earlier run's, or a"
                " clock is behind",
                worse=True,
            )
        return _Look("the local copy is of another save, and not a newer one")

    def newest(
        self, folder: str, found: str | None, which: Callable[[str], bool], order: Callable[[Commit], Any]
    ) -> Commit | None:
        """The newest of a folder's checkpoints that has a local copy, if that is newer than the one that was found in
        the folder itself. Not collective: it is about what this machine has.

        One of that same name isn't, as :meth:`source` compares these, which also reads the one that is found. Where the
        folder has none at all, one of which this machine has a part counts, too.

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
        if there is None:
            return next((one for one, _ in [*reversed(whole), *reversed(sound)]), None)
        for one, copy in reversed(whole):
            if _has_digests(copy):
                newer = _is_later(one[0], there) and _is_of_later_step(_step(copy), there)
                return one if newer and one[1] != found else None
        return None


@dataclass(frozen=True)
class _Copy:
    """What a rank sees of a local copy."""

    rank: int
    attempt: str = ""
    committed: datetime = LONG_AGO
    step: int | None = None
    """None also where the trainer's state lies on another machine's disk."""
    digests: bool = False
    """Whether it has any: else it can't be known to be whole."""
    carried: bool = False
    """Whether it has been in the store."""
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


def _note_of(copy: str) -> str:
    folder, name = os.path.split(copy)
    return os.path.join(folder, CARRIED, name)


def _note_carried(copy: Checkpoint) -> None:
    """Keep in mind that a copy is in the store; where that isn't possible, the store is asked when it matters."""
    with contextlib.suppress(OSError):
        note = _note_of(copy.path)
        os.makedirs(os.path.dirname(note), exist_ok=True)
        with open(note, "w") as file:
            file.write(copy.manifest.attempt)


def _was_carried(copy: Checkpoint) -> bool:
    try:
        with open(_note_of(copy.path)) as file:
            return file.read() == copy.manifest.attempt
    except (OSError, ValueError):
        return False


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


def _sound(path: str, storage_options: dict[str, Any]) -> Checkpoint | None:
    """What is at a path; None where that is nothing, or has a damaged manifest. Other errors are the caller's."""
    try:
        return read(path, storage_options=storage_options)
    except (CheckpointNotFoundError, CorruptCheckpointError):
        return None


def _has_digests(checkpoint: Checkpoint) -> bool:
    return checkpoint.manifest.block_bytes > 0


def _step(checkpoint: Checkpoint) -> int | None:
    try:
        return step_of(checkpoint.state_json())
    except (CheckpointError, OSError):
        return None


# A local copy is newer if it was committed later *and* is of a later step: clocks of two machines may differ, and a
# copy of an earlier run at the same path may be of a later step.


def _is_later(committed: datetime, there: Checkpoint) -> bool:
    theirs = committed_at(there.store)
    return theirs is not None and committed > theirs


def _is_of_later_step(step: int | None, there: Checkpoint) -> bool:
    """Whether a local copy is; in doubt, it isn't."""
    if step is None:
        return False
    try:
        other = step_of(there.state_json())
    except CorruptCheckpointError:
        return True  # the store's can't be loaded
    return other is not None and step > other


def _is_older(copy: Checkpoint, there: Checkpoint) -> bool:
    """Whether what is in the store has taken the place of a copy that was never carried; in doubt, it hasn't."""
    ours, theirs = committed_at(copy.store), committed_at(there.store)
    return ours is not None and theirs is not None and ours < theirs and not _is_of_later_step(_step(copy), there)
