"""The checkpoints of a folder: which are there, which is the newest, and removing the oldest; on any store.

A folder's checkpoints are the directories in it that have a manifest, in the order of their commits by the store's
clock; by their names where the store tells no times, and there nothing is pruned. A directory without one, as a save
that is under way or was cut off leaves it, is neither found nor removed.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lightning_shard.checkpoint.folder import remove_attempt
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.store import LocalStore, Store, as_path, open_filesystem, open_store
from lightning_shard.checkpoint.store.calls import Calls
from lightning_shard.checkpoint.store.remote import REQUESTS
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError

UNTOLD = datetime.min.replace(tzinfo=UTC)
"""When a checkpoint was committed, where the store doesn't tell."""
STEP_KEYS = ("global_step", "step")
"""Where a trainer state may say which step it is of: Lightning's name, and what one would call it."""


@dataclass(frozen=True)
class Entry:
    """A committed checkpoint in a folder. It may be given wherever a checkpoint's path is asked for.

    Attributes:
        name: Its directory's, in the folder.
        committed: When its manifest was written, by the store's clock; UTC. The year 1 where the store doesn't tell.
        step: ``global_step`` or ``step`` of its trainer state; None if that says nothing.
        bytes: Of all its files but the manifest.
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
) -> list[tuple[datetime, str]]:
    """The committed checkpoints in a folder whose names are asked for, and when they were committed; the oldest first.

    Of those of one moment (many stores tell the time in seconds) the order is that of their names, in which numbers
    count as such.
    """
    root = as_path(folder)
    names = [name for name in names_in(root, storage_options) if which(name)]

    def look(name: str) -> datetime | None:
        return committed_at(open_store(posixpath.join(root, name), storage_options))

    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="checkpoint-list") as pool:
        times = list(pool.map(look, names))
    found = [(when, name) for when, name in zip(times, names) if when is not None]
    return sorted(found, key=lambda item: (item[0], _natural(item[1])))


def names_in(folder: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> list[str]:
    """What is in a folder, files and folders, without what is in these; nothing if it isn't there."""
    fs, base = open_filesystem(folder, storage_options)
    calls = Calls(fs, as_path(folder), storage_options, (storage_options or {}).get("stall_s"))
    try:
        paths = calls("ls", base, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({posixpath.basename(path.rstrip("/")) for path in paths} - {""})


def committed_at(store: Store) -> datetime | None:
    """When a checkpoint's manifest was written; None where there is none."""
    try:
        seconds = store.modified(MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads in a circle
            return None
        raise
    if seconds is None:  # the store doesn't tell
        return UNTOLD if store.exists(MANIFEST_NAME) else None
    return datetime.fromtimestamp(seconds, UTC)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """To sort by: ``step=9`` before ``step=10``."""
    parts = (part for part in re.split(r"(\d+)", name) if part)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def latest(folder: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> str | None:
    """The path of the checkpoint that was committed last; None where none is there. Not collective."""
    found = commits(folder, storage_options)
    return posixpath.join(as_path(folder), found[-1][1]) if found else None


def list_checkpoints(folder: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> list[Entry]:
    """``checkpoint.list``: the committed checkpoints of a folder, the oldest first, but for links. Not collective.

    Reads each one's manifest, and the file of its trainer state.
    """
    root = as_path(folder)
    store = open_store(root, storage_options)
    links = isinstance(store, LocalStore)
    found = commits(root, storage_options, lambda name: not (links and os.path.islink(os.path.join(store.root, name))))

    def look(commit: tuple[datetime, str]) -> Entry:
        committed, name = commit
        path = posixpath.join(root, name)
        try:
            checkpoint = read(path, storage_options=storage_options)
            tree = checkpoint.state_json()
        except CheckpointError as error:
            return Entry(path, name, committed, fault=str(error))
        size = sum(file.bytes for file in checkpoint.manifest.files)
        return Entry(path, name, committed, checkpoint.manifest.attempt, step_of(tree), size)

    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="checkpoint-list") as pool:
        return list(pool.map(look, found))


def step_of(tree: Any) -> int | None:
    """Which step a trainer state is of, if it says so."""
    values = [tree.get(key) for key in STEP_KEYS] if isinstance(tree, dict) else []
    return next((value for value in values if type(value) is int), None)


def prune(
    folder: str | os.PathLike[str],
    *,
    keep: int,
    protect: Iterable[str | os.PathLike[str]] | Callable[[Entry], bool] = (),
    storage_options: dict[str, Any] | None = None,
) -> list[str]:
    """Remove a folder's checkpoints but for those that were committed last. Not collective: call it on one rank.

    What a link in the folder leads to stays, and so does a checkpoint whose manifest is damaged, which isn't counted,
    and what a save has put in the place of one meanwhile.

    Args:
        keep: How many of the newest stay; at least 1.
        protect: What else stays: paths, or names in the folder; or a function that is asked about each one that would
            be removed.

    Returns:
        The paths of those that were removed.

    Raises:
        CheckpointNotFoundError: A protected one isn't there; nothing has been removed then.
        CheckpointError: The store doesn't tell when files were written, so which are the newest isn't known.
    """
    if keep < 1:
        raise ConfigurationError(f"keep ({keep}) must be at least 1: to remove all, remove each by checkpoint.remove.")
    root = as_path(folder)
    entries = list_checkpoints(root, storage_options=storage_options)
    kept = set() if callable(protect) else _named(root, entries, protect)
    kept |= _linked(root, storage_options)
    old = [entry for entry in entries if entry.fault is None][:-keep]
    old = [entry for entry in old if entry.name not in kept and not (callable(protect) and protect(entry))]
    if any(entry.committed == UNTOLD for entry in old):
        raise CheckpointError(
            f"{root}: the store doesn't tell when files were written, so which checkpoints are the newest isn't known:"
            " nothing has been removed. Remove those that aren't needed by checkpoint.remove."
        )
    return [entry.path for entry in old if remove_attempt(entry.path, entry.attempt, storage_options)]


def _named(root: str, entries: list[Entry], protect: Iterable[str | os.PathLike[str]]) -> set[str]:
    """The names in the folder of checkpoints that are given by path or by name."""
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
    """The same for all spellings of one local path; a URL as it is."""
    scheme, found, rest = path.partition("://")
    if found and scheme not in ("file", "local"):
        return path
    return os.path.realpath(rest if found else path)


def _linked(root: str, storage_options: dict[str, Any] | None) -> set[str]:
    """The names of what links in a local folder lead to, where that is in it too."""
    folder = open_store(root, storage_options)
    if not isinstance(folder, LocalStore) or not os.path.isdir(folder.root):
        return set()
    here = os.path.realpath(folder.root)
    targets = (os.path.realpath(entry.path) for entry in os.scandir(here) if entry.is_symlink())
    return {os.path.basename(target) for target in targets if os.path.dirname(target) == here}
