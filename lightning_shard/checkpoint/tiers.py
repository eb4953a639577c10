"""Two-tier checkpoints: a save commits to local disks first, and is then copied ("carried") to its destination store.

The local copy is an ordinary checkpoint, in a folder whose name is derived from the destination path. Both have the
same attempt id, which identifies them as one checkpoint.

Machines may have their own disks, or mount a common folder; this needn't be configured. Each rank writes its files to
its machine's folder, and the manifest is put beside them on every machine. A rank carries the files that it wrote, and
needs no others for that. Loading needs others' files (the trainer state, parts of replicated tensors), so a local copy
is read in place only if every rank sees all of its files. A copy on several disks is carried to its store, and read
there.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from lightning_shard.checkpoint.carry import attempt_at, carry, damage
from lightning_shard.checkpoint.catalog import UNTOLD, commits, committed_at, look, names_in, remove, step_of
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.manifest import FileEntry, writer_of
from lightning_shard.checkpoint.loading.open import Found, find, open_found, read
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Ranks, all_or_none, together
from lightning_shard.checkpoint.saving.commit import commit
from lightning_shard.checkpoint.store import as_path, open_store, parted
from lightning_shard.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
)

KEPT = 2
"""How many local copies stay in one folder."""
CARRIED = ".carried"
"""Folder beside the copies, with a file for each copy that was carried: the copy's name, containing its attempt id."""

Commit = tuple[datetime, str]
"""The time of a commit, and the checkpoint's name."""


@dataclass(frozen=True)
class Source:
    """The place to read a checkpoint from.

    Attributes:
        path: The checkpoint's directory there.
        local: Whether ``path`` is the local copy.
        why: The reason for the choice, for messages.
        worse: Worth a warning: a local copy that may be newer couldn't be used, or is the only one.
    """

    path: str
    local: bool
    why: str
    worse: bool = False


@dataclass(frozen=True)
class LocalTier:
    """The local folder, and the options of the stores that its checkpoints are carried to."""

    root: str
    storage_options: dict[str, Any] = field(repr=False)  # may hold secrets

    @classmethod
    def at(cls, path: str | os.PathLike[str], storage_options: dict[str, Any]) -> LocalTier:
        """The tier of a local folder. Raises ConfigurationError if the path isn't on the local disk."""
        store = open_store(path)
        if store.folder is None:
            raise ConfigurationError(f"local ({as_path(path)}) must be a folder of the local disk.")
        return cls(os.path.abspath(store.folder), storage_options)

    def folder(self, path: str) -> str:
        """The local folder for copies of checkpoints in the destination folder ``path``; unique among all stores."""
        place = open_store(path, self.storage_options).place()
        return os.path.join(self.root, f"{posixpath.basename(place[0])}-{digest(repr(place).encode())[:12]}")

    def copy_of(self, path: str) -> str:
        """The path of the local copy of the checkpoint at ``path``."""
        here = open_store(path, self.storage_options).folder
        folder, name = parted(as_path(path) if here is None else os.path.abspath(here))
        return os.path.join(self.folder(folder), name)

    # -- saving -------------------------------------------------------------------------------------------------------

    def carry(self, path: str, ranks: Ranks, *, fsync: bool) -> None:
        """Carry a local copy, just committed, to its store. A collective call of the ranks that saved it.

        If any rank fails, every rank raises, nothing is committed in the store, and the local copy stays.

        Raises:
            CheckpointConflictError: Another save has committed to the path meanwhile. Its checkpoint stays.
            CheckpointError: A rank couldn't read or write, or the copy is damaged.
        """
        checkpoint = _open_together(self.copy_of(path), ranks, ranks.members[0])
        with all_or_none(ranks.group):
            if _put_manifest_here(checkpoint, fsync) or ranks.first:
                self._prune(path)
        own_files = [file for file in checkpoint.manifest.files if _writer(file, ranks) == ranks.rank]
        carry(checkpoint, path, own_files, ranks, storage_options=self.storage_options, fsync=fsync)
        _note_carried(checkpoint)

    def _prune(self, path: str) -> None:
        """Remove this machine's old copies, ignoring errors: a copy left behind doesn't harm the checkpoint."""
        folder, name = os.path.split(self.copy_of(path))
        with contextlib.suppress(Exception):
            kept = {CARRIED, name, *(newest for _, newest in commits(folder)[-KEPT:])}
            for other in sorted({*names_in(folder)} - kept):
                with contextlib.suppress(Exception):
                    if not self._is_needed(posixpath.join(parted(as_path(path))[0], other)):
                        self._remove(os.path.join(folder, other))

    def _is_needed(self, path: str) -> bool:
        """Whether a copy may be the only one of a checkpoint: not carried, nor superseded by a newer one in the store.

        A copy that was carried isn't needed, even if it has been removed from the store since.
        """
        copy = _sound(self.copy_of(path), {})
        if copy is None or _was_carried(copy):  # a directory without a checkpoint: only its old leftovers are removed
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
        """Decide where to read a checkpoint. A collective call.

        The local copy is used if it is the same checkpoint as the one at the path, or newer, or the only one. It is
        verified first, each rank reading some of its files; if it is damaged or incomplete, the store's is used. Then
        it is carried to the path, if it isn't there yet. A copy that all ranks see is read in place, even if carrying
        fails; a copy on several machines' disks is read at the path.

        Raises:
            CorruptCheckpointError: The copy is damaged, and the store has no checkpoint.
            CheckpointError: The copy is on several machines' disks, and couldn't be carried.
        """
        seen = together(ranks, partial(self._copy_at, path, ranks.rank), partial(self._look, path))
        if seen.copy is None:
            return Source(path, False, seen.why, seen.worse)
        try:
            checkpoint = _open_together(self.copy_of(path), ranks, seen.copy.rank)
        except CorruptCheckpointError as error:  # on all ranks
            return _instead(path, seen, str(error))
        files = checkpoint.manifest.files
        everywhere, readers = together(ranks, partial(_seen, checkpoint), partial(_readers, ranks))
        if None in readers:
            fault = f"{checkpoint.path}/{files[readers.index(None)].path} of it is gone or was cut off"
            if seen.copy.carried and not seen.other:  # another machine's part was removed with the checkpoint
                return Source(path, False, f"it was carried there, and its local copy isn't whole ({fault})", True)
            return _instead(path, seen, fault)
        if seen.same and not everywhere:
            return Source(path, False, "its local copy lies on several machines' disks")
        own_files = [file for file, reader in zip(files, readers, strict=True) if reader == ranks.rank]
        fault = together(ranks, partial(damage, checkpoint, own_files), lambda faults: next(filter(None, faults), ""))
        if fault:
            return _instead(path, seen, fault)
        if seen.same or (ranks.alone and not Ranks.of().alone):  # ranks that load independently don't carry
            return Source(checkpoint.path, True, seen.why)
        try:
            carry(checkpoint, path, own_files, ranks, storage_options=self.storage_options, fsync=fsync)
        except BaseException as error:  # raised on all ranks
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
        attempt, digests, carried = copy.manifest.attempt, copy.manifest.block_bytes > 0, _was_carried(copy)
        return _Copy(rank, attempt, committed or UNTOLD, _step(copy), digests, carried)

    def _look(self, path: str, copies: list[_Copy]) -> _Look:
        """Compare the newest of the ranks' copies with the checkpoint in the store (on the first rank)."""
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
        if of_later_step or (committed_later and step is None):
            return _Look(
                f"the local copy (step {step}, committed {'later' if committed_later else 'earlier'}) may be newer, or"
                " belong to an earlier run, or a clock is wrong",
                worse=True,
            )
        return _Look("the local copy is of another save, and not a newer one")

    def newest(
        self, folder: str, found: str | None, which: Callable[[str], bool], order: Callable[[Commit], Any]
    ) -> Commit | None:
        """The newest local copy of a checkpoint in a folder, if it is newer than the one found in the folder itself.

        Not collective: considers only this machine's copies. A copy of the same name as the found checkpoint doesn't
        count, since :meth:`source` compares these when that one is read. If the folder has no checkpoint at all, an
        incomplete copy, of which this machine has a part, counts, too.

        Args:
            folder: The destination folder.
            found: The name of the newest checkpoint in the folder itself; None if there is none.
            which: Called with each name; False leaves it out.
            order: Sort key of commits; the last is the newest.
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
            if copy.manifest.block_bytes:
                newer = _is_later(one[0], there) and _is_of_later_step(_step(copy), there)
                return one if newer and one[1] != found else None
        return None


@dataclass(frozen=True)
class _Copy:
    """A local copy, as one rank sees it. ``attempt`` is empty if it sees none."""

    rank: int
    attempt: str = ""
    committed: datetime = UNTOLD
    step: int | None = None
    """None also if the trainer state is on another machine's disk."""
    digests: bool = False
    """Whether it has digests; without them damage can't be detected."""
    carried: bool = False
    """Whether it has been carried to the store at any time."""
    fault: str = ""
    """Why it can't be read; empty if it can."""


@dataclass(frozen=True)
class _Look:
    """The first rank's decision.

    Attributes:
        why: The reason, for messages.
        copy: The local copy to read, provided that it is whole; None to read from the store.
        same: Whether the store has the same attempt.
        other: Whether the store has a checkpoint that can be read instead.
        worse: See :class:`Source`.
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
    """Record on disk that a copy was carried; if that fails, the store is asked later when it matters."""
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
    """Open a copy on all ranks by ``holder``'s manifest; each rank reads files on its own disk. A collective call."""

    def look() -> Found | None:
        try:
            return find(copy, None, with_table=True) if ranks.rank == holder else None
        except CheckpointError as error:
            raise CorruptCheckpointError(str(error)) from error

    found: Found = together(ranks, look, lambda looks: next(one for one in looks if one is not None))
    return open_found(copy, None, True, found._replace(root=copy))  # each rank's own disk


def _instead(path: str, seen: _Look, fault: str) -> Source:
    """The store's checkpoint, since the copy is damaged; raises CorruptCheckpointError if there is none."""
    if not seen.other:
        raise CorruptCheckpointError(
            f"The local copy of {path} is damaged, and no checkpoint is there ({fault}): resume from another one, or"
            " remove the copy."
        )
    return Source(path, False, f"its local copy is damaged ({fault})", worse=not seen.same)


def _put_manifest_here(checkpoint: Checkpoint, fsync: bool) -> bool:
    """Put the manifest on this rank's disk, if the first rank has put it on another one; returns whether it did so."""
    store, manifest = checkpoint.store, checkpoint.manifest
    if attempt_at(store) != manifest.attempt:
        with contextlib.suppress(CheckpointConflictError):  # another rank of this machine was first
            commit(store, manifest, look(store), durable=fsync)
            return True
    return False


def _writer(file: FileEntry, ranks: Ranks) -> int:
    """The rank that wrote a file, from its name; the first rank for the trainer state."""
    rank = writer_of(file.path)
    return rank if rank is not None and rank in ranks.members else ranks.members[0]


def _seen(checkpoint: Checkpoint) -> list[bool]:
    """For each file, whether this rank sees it with its full size."""

    def is_there(file: FileEntry) -> bool:
        with contextlib.suppress(OSError):
            return checkpoint.store.size(file.path) == file.bytes
        return False

    return [is_there(file) for file in checkpoint.manifest.files]


def _readers(ranks: Ranks, seen: list[list[bool]]) -> tuple[bool, list[int | None]]:
    """Whether every rank sees all files; and for each file one of the ranks that see it (round robin), or None."""
    able = [[rank for rank, is_there in zip(ranks.members, by_rank) if is_there] for by_rank in zip(*seen)]
    return all(map(all, seen)), [own[number % len(own)] if own else None for number, own in enumerate(able)]


def _sound(path: str, storage_options: dict[str, Any]) -> Checkpoint | None:
    """Open the checkpoint at a path; None if there is none, or its manifest is damaged. Other errors are raised."""
    with contextlib.suppress(CheckpointNotFoundError, CorruptCheckpointError):
        return read(path, storage_options=storage_options)
    return None


def _step(checkpoint: Checkpoint) -> int | None:
    with contextlib.suppress(CheckpointError, OSError):
        return step_of(checkpoint.state_json())
    return None


# A local copy counts as newer if it was committed later *and* has a later step: two machines' clocks may differ, and a
# copy of an earlier run at the same path may have a later step.


def _is_later(committed: datetime, there: Checkpoint) -> bool:
    theirs = committed_at(there.store)
    return theirs is not None and committed > theirs


def _is_of_later_step(step: int | None, there: Checkpoint) -> bool:
    """Whether a local copy of step ``step`` has a later step than the store's checkpoint; in doubt, False."""
    if step is None:
        return False
    try:
        other = step_of(there.state_json())
    except CorruptCheckpointError:
        return True  # the store's checkpoint can't be loaded
    return other is not None and step > other


def _is_older(copy: Checkpoint, there: Checkpoint) -> bool:
    """Whether the store's checkpoint supersedes a copy that was never carried; in doubt, False."""
    ours, theirs = committed_at(copy.store), committed_at(there.store)
    return ours is not None and theirs is not None and ours < theirs and not _is_of_later_step(_step(copy), there)
