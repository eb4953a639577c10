"""Folders of checkpoints: lists them, finds the newest, and prunes the oldest; removal of a checkpoint; on any store.

A folder's checkpoints are the directories in it that have a manifest, ordered by the manifests' times by the store's
clock. If the store has no times, they are ordered by name, and nothing is pruned.

Removal never takes files that another save or a reader needs:

- A manifest is removed only if it is still the one that was read.
- Then only files are removed that this manifest names, and whose names only this format makes.
- Files that no manifest names may belong to a save in progress, so they are removed only when they are old.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lightning_shard.arguments import check_count, few
from lightning_shard.checkpoint.engine import each
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.store import Stamp, Store, as_path, local_path, open_filesystem, open_store
from lightning_shard.checkpoint.store.calls import Calls, naming
from lightning_shard.checkpoint.store.protocol import temporary_name
from lightning_shard.checkpoint.store.remote import REQUESTS
from lightning_shard.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ConfigurationError,
)

LEFTOVER_AGE_S = 3600.0
"""Age of an uncommitted attempt's newest file after which the attempt is taken for a crashed save's."""

# Matched as text, not parsed, so that torn manifests and later format versions work, too.
_OURS = re.compile(rb'"format"\s*:\s*"lightning_shard"')
_NAMED = re.compile(rb'"path"\s*:\s*"(' + OWN_FILE.pattern.encode() + rb')"')
_ATTEMPT = re.compile(rb'"attempt"\s*:\s*"([^"]*)"')
_BLANK = b"\0 \t\r\n"
_TEMPORARY = re.compile(rf"(?:{re.escape(MANIFEST_NAME)}|{OWN_FILE.pattern})\.(?:\d+-[0-9a-f]{{8}}\.)?tmp")


@dataclass(frozen=True)
class Earlier:
    """The manifest at a path before an operation: its stamp, its attempt, and the files that it names, as far as only
    this format makes such names."""

    stamp: Stamp | None = None
    attempt: str = ""
    files: frozenset[str] = frozenset()


def look(store: Store) -> Earlier:
    """Note the manifest that is there now. A torn or empty one is noted, too, although it is no checkpoint."""
    data = b""
    stamp, seen = store.stamp(MANIFEST_NAME), None
    while stamp is not None and stamp != seen:  # until the stamp is of the bytes that were read
        try:
            data = store.read(MANIFEST_NAME)
        except FileNotFoundError:
            return Earlier()
        stamp, seen = store.stamp(MANIFEST_NAME), stamp
    if stamp is None:
        return Earlier()
    if not _OURS.search(data) and data.strip(_BLANK):
        raise CheckpointError(
            f"{store.root}/{MANIFEST_NAME} is another program's: it has no format=lightning_shard. It is neither"
            " replaced nor removed: use another path, or move it away."
        )
    attempt = _ATTEMPT.search(data)
    named = frozenset(match[1].decode() for match in _NAMED.finditer(data))
    return Earlier(stamp, attempt[1].decode(errors="replace") if attempt else "", named)


def remove(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> None:
    """Remove a checkpoint; does nothing if there is none.

    The manifest is removed first, so that a half-removed checkpoint isn't taken for one. Then only the files that it
    names are removed, leftovers of crashed saves that are older than an hour, and the format's own folders if they are
    empty. Of a symbolic link, only the link is removed. A checkpoint that another save commits meanwhile stays.

    Raises:
        CheckpointError: There is a ``manifest.json`` of another program, or the store fails.
    """
    with naming(path, "removed"):
        _remove(open_store(path, storage_options), None)


def _remove(store: Store, attempt: str | None) -> bool:
    """Remove the checkpoint, if it is of ``attempt`` or this is None; returns whether it was removed."""
    if store.folder is not None and os.path.islink(store.folder):
        if store.exists(MANIFEST_NAME) or not os.path.exists(store.folder):
            os.unlink(store.folder)
        return attempt is None
    earlier = look(store)
    if attempt is not None and earlier.attempt != attempt:
        return False
    if earlier.stamp is not None:
        try:
            store.remove(MANIFEST_NAME, only=earlier.stamp)
        except CheckpointConflictError:
            return False  # another save has just replaced it, and removes the old files itself
        with contextlib.suppress(OSError):  # as where another process has removed the folder meanwhile
            store.sync([MANIFEST_NAME])  # else a power cut may leave the manifest of files that are gone
    remove_files(store, earlier.files)
    if not store.exists(MANIFEST_NAME):
        remove_leftovers(store, clock=lambda: _clock(store))
        store.remove_empty_folders()
    return True


def exists(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> bool:
    """Whether there is a committed checkpoint at the path, that is, a manifest.

    Raises:
        CheckpointError: The store can't be asked.
    """
    with naming(path):
        return open_store(path, storage_options).exists(MANIFEST_NAME)


def remove_files(store: Store, names: Iterable[str]) -> None:
    """Remove files, ignoring errors: a file left behind doesn't harm the checkpoint."""
    for name in sorted(names):
        with contextlib.suppress(Exception):
            store.remove(name)


def remove_leftovers(store: Store, *, keep: Iterable[str] = (), clock: Callable[[], float | None]) -> None:
    """Remove old files of crashed saves, ignoring errors: a file left behind doesn't harm the checkpoint.

    Args:
        keep: The files that the manifest names.
        clock: Returns the time by the store's own clock; called only if there are leftovers.
    """
    with contextlib.suppress(Exception):
        attempts: dict[str, list[str]] = {}
        for name in set(store.names()).difference(keep):
            if own := OWN_FILE.fullmatch(name):
                attempts.setdefault(own[3], []).append(name)
            elif _TEMPORARY.fullmatch(name):
                attempts.setdefault(name, []).append(name)
        now = clock() if attempts else None
        if now is None:
            return
        for names in attempts.values():
            times = [store.modified(name) for name in names]
            if all(time is not None and now - time > LEFTOVER_AGE_S for time in times):
                remove_files(store, names)


def _clock(store: Store) -> float | None:
    """The time by the store's own clock, which may differ from this machine's: the mtime of a file written now."""
    name = temporary_name(MANIFEST_NAME)
    try:
        store.write(name, [], 0, durable=False)
        return store.modified(name)
    finally:
        store.remove(name)


UNTOLD = datetime.min.replace(tzinfo=UTC)
"""The time of a commit if the store has no times."""
_OF_FILE_SYSTEMS = {"lost+found"}
"""Folders that hold no checkpoints, and that few may look into."""


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint in a folder. Can be passed wherever a checkpoint's path is expected.

    Attributes:
        path: The checkpoint's directory.
        name: The directory's name in the folder.
        committed: When its manifest was written, by the store's clock, in UTC. The year 1 if the store has no times.
        attempt: The attempt id of the save that wrote it.
        step: ``global_step`` or ``step`` of its trainer state; None without either.
        bytes: Bytes of all its files except the manifest.
        fault: Why its manifest can't be read; None if it can.
    """

    path: str
    name: str
    committed: datetime
    attempt: str = ""
    step: int | None = None
    bytes: int = 0
    fault: str | None = None

    def __fspath__(self) -> str:
        return self.path


def commits(
    folder: str | os.PathLike[str],
    storage_options: dict[str, Any] | None = None,
    which: Callable[[str], bool] = lambda name: True,
    *,
    all_known: bool = False,
) -> list[tuple[datetime, str]]:
    """(time of the commit, name) of a folder's committed checkpoints, the oldest first.

    Commits of the same time (many stores count in seconds) are ordered by name, with numbers in names compared as
    numbers.

    Args:
        folder: The folder.
        storage_options: For fsspec.
        which: Called with each name; False leaves it out.
        all_known: Raise if it can't be told whether a name is one, because of permissions; otherwise warn.

    Raises:
        CheckpointError: The store can't be asked.
    """
    root = as_path(folder)
    remote = local_path(root) is None

    # a manifest stands for its own checkpoint, which isn't in the folder; and in a URL "::" would join others
    names = [name for name in names_in(root, storage_options) if not (remote and "::" in name)]
    names = [name for name in names if name != MANIFEST_NAME and which(name)]
    hidden: list[str] = []

    def look(name: str) -> datetime | None:
        try:
            return committed_at(open_store(posixpath.join(root, name), storage_options), hidden=FileNotFoundError)
        except PermissionError:
            if all_known:
                raise
            hidden.append(name)
            return None

    with naming(root):
        times = [when for _, when in each(look, names, REQUESTS)]
    if hidden := sorted(set(hidden) - _OF_FILE_SYSTEMS):
        warnings.warn(
            f"{posixpath.join(root, few(hidden, 1))} can't be looked into (permission denied): a checkpoint there"
            " isn't counted.",
            stacklevel=3,
        )
    found = [(when, name) for when, name in zip(times, names) if when is not None]
    return sorted(found, key=lambda item: (item[0], _natural(item[1])))


def names_in(folder: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> list[str]:
    """The names of the files and folders directly in a folder; empty if it doesn't exist."""
    paths: list[str] = []
    with naming(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        paths = _ask("ls", folder, storage_options, detail=False)
    return sorted({posixpath.basename(path.rstrip("/")) for path in paths} - {""})


def is_file(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> bool:
    """Whether a file is at the path."""
    with naming(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return bool(_ask("info", path, storage_options)["type"] == "file")
    return False


def _ask(what: str, path: str | os.PathLike[str], storage_options: dict[str, Any] | None, **options: Any) -> Any:
    fs, place = open_filesystem(path, storage_options)
    calls = Calls(fs, as_path(path), storage_options, (storage_options or {}).get("stall_s"))
    return calls(what, place, **options)


def committed_at(store: Store, *, hidden: type[Exception] = PermissionError) -> datetime | None:
    """When a checkpoint's manifest was written; None if there is none, or one that can't be seen (``hidden``)."""
    try:
        seconds = store.modified(MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, hidden):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a circular symbolic link
            return None
        raise
    if seconds is None:  # the store has no times
        return UNTOLD if store.exists(MANIFEST_NAME) else None
    return datetime.fromtimestamp(seconds, UTC)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that compares numbers as numbers: ``step=9`` before ``step=10``."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    # decimal as the pattern's digits are: others, such as superscripts, are no numbers for int()
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def latest(folder: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> str | None:
    """The path of the checkpoint that was committed last; None if there is none. Not collective.

    Raises:
        CheckpointError: The store can't be asked.
    """
    found = commits(folder, storage_options)
    return posixpath.join(as_path(folder), found[-1][1]) if found else None


def list_checkpoints(folder: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> list[Entry]:
    """``checkpoint.list``: the committed checkpoints of a folder, the oldest first, without links. Not collective.

    Reads each checkpoint's manifest, and the file of its trainer state.

    Raises:
        CheckpointError: The store can't be asked.
    """
    root = as_path(folder)
    here = open_store(root, storage_options).folder
    found = commits(root, storage_options, lambda name: here is None or not os.path.islink(os.path.join(here, name)))

    def look(commit: tuple[datetime, str]) -> Entry | None:
        committed, name = commit
        path = posixpath.join(root, name)
        try:
            checkpoint = read(path, storage_options=storage_options)
            tree = checkpoint.state_json()
        except CheckpointError as error:
            gone = isinstance(error, CheckpointNotFoundError | CheckpointReplacedError)
            if gone and not exists(path, storage_options=storage_options):
                return None  # removed since the folder was listed
            return Entry(path, name, committed, fault=str(error))
        size = sum(file.bytes for file in checkpoint.manifest.files)
        return Entry(path, name, committed, checkpoint.manifest.attempt, step_of(tree), size)

    return [entry for _, entry in each(look, found, REQUESTS) if entry is not None]


def step_of(tree: Any) -> int | None:
    """The step that a trainer state records, under Lightning's key or the usual one; None if it records none."""
    values = [tree.get(key) for key in ("global_step", "step")] if isinstance(tree, dict) else []
    return next((value for value in values if type(value) is int), None)


def prune(
    folder: str | os.PathLike[str],
    *,
    keep: int,
    protect: Iterable[str | os.PathLike[str]] | Callable[[Entry], bool] = (),
    storage_options: dict[str, Any] | None = None,
) -> list[str]:
    """Remove all but the newest checkpoints of a folder. Not collective: call it on one rank.

    These stay, too: targets of links in the folder; checkpoints with a damaged manifest, which don't count for
    ``keep``; and a checkpoint that another save has replaced meanwhile.

    Args:
        folder: The folder.
        keep: How many of the newest stay; at least 1.
        protect: Checkpoints that stay, too: paths, or names in the folder; or a function that is called with each one
            that would be removed, and returns True to keep it.
        storage_options: For fsspec.

    Returns:
        The paths of the removed checkpoints.

    Raises:
        ConfigurationError: ``keep`` is no integer from 1, or ``protect`` neither paths nor a function.
        CheckpointNotFoundError: A protected checkpoint doesn't exist; nothing has been removed.
        CheckpointError: The store has no times of files, so the newest aren't known.
    """
    check_count("keep", keep, 1, ": to remove all, remove each by checkpoint.remove")
    if not callable(protect) and not isinstance(protect, Iterable):
        raise ConfigurationError(f"protect ({protect!r:.80}) must be paths, names in the folder, or a function.")
    root = as_path(folder)
    entries = list_checkpoints(root, storage_options=storage_options)
    kept = set() if callable(protect) else _named(root, entries, protect)
    with naming(root):
        kept |= _linked(root, storage_options)
    old = [entry for entry in entries if entry.fault is None][:-keep]
    old = [entry for entry in old if entry.name not in kept and not (callable(protect) and protect(entry))]
    if any(entry.committed == UNTOLD for entry in old):
        raise CheckpointError(
            f"{root}: this store provides no modification times, so which checkpoints are the newest isn't known:"
            " nothing has been removed. Remove those that aren't needed by checkpoint.remove."
        )
    with naming(root, "pruned"):
        return [entry.path for entry in old if _remove(open_store(entry.path, storage_options), entry.attempt)]


def _named(root: str, entries: list[Entry], protect: Iterable[str | os.PathLike[str]]) -> set[str]:
    """Resolve paths or names of checkpoints to names in the folder."""
    places = {_place(spelling): entry.name for entry in entries for spelling in (entry.name, entry.path)}
    names = set()
    for path in [protect] if isinstance(protect, str | os.PathLike) else protect:
        if (name := places.get(_place(as_path(path)))) is None:
            raise CheckpointNotFoundError(
                f"protect names {os.fspath(path)}, which is no checkpoint in {root}: nothing has been removed."
            )
        names.add(name)
    return names


def _place(path: str) -> str:
    """Canonical form: equal for all spellings of one local path; a URL is unchanged."""
    local = local_path(path)
    return path if local is None else os.path.realpath(local)


def _linked(root: str, storage_options: dict[str, Any] | None) -> set[str]:
    """The names of those entries of a local folder that links in the folder lead to."""
    folder = open_store(root, storage_options).folder
    if folder is None or not os.path.isdir(folder):
        return set()
    here = os.path.realpath(folder)
    targets = (os.path.realpath(entry.path) for entry in os.scandir(here) if entry.is_symlink())
    return {os.path.basename(target) for target in targets if os.path.dirname(target) == here}
