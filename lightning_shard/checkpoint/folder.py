"""A checkpoint's directory: what is in it, whether it is a checkpoint, and removal.

Removal follows three rules, so that it never takes files that another save or a reader needs:

- A manifest is removed only if it is still the one that was read.
- Then only files are removed that this manifest names, and whose names only this format makes.
- Files that no manifest names may belong to a save in progress, so they are removed only when they are old.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE
from lightning_shard.checkpoint.store import Stamp, Store, open_store
from lightning_shard.checkpoint.store.calls import naming
from lightning_shard.errors import CheckpointConflictError, CheckpointError

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
    """The manifest at a path before an operation: its stamp, its attempt, and the files that it names."""

    stamp: Stamp | None = None
    attempt: str = ""
    files: frozenset[str] = frozenset()


def look(store: Store) -> Earlier:
    """Note the manifest that is there now. A torn or empty one is noted, too, although it is no checkpoint.

    Raises:
        CheckpointError: There is a ``manifest.json`` of another program.
    """
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
    return Earlier(stamp, attempt[1].decode(errors="replace") if attempt else "", named_files(data))


def named_files(manifest: bytes) -> frozenset[str]:
    """The files that a manifest names, as far as their names are ones that only this format makes."""
    return frozenset(match[1].decode() for match in _NAMED.finditer(manifest))


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


def remove_attempt(path: str | os.PathLike[str], attempt: str, storage_options: dict[str, Any] | None) -> bool:
    """Remove the checkpoint of ``attempt``, unless another one has replaced it; returns whether it was removed.

    Raises:
        CheckpointError: The store fails.
    """
    with naming(path, "removed"):
        return _remove(open_store(path, storage_options), attempt)


def _remove(store: Store, attempt: str | None) -> bool:
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
    name = f"{MANIFEST_NAME}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        store.write(name, [], 0, durable=False)
        return store.modified(name)
    finally:
        store.remove(name)
