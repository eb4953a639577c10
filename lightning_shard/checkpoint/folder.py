"""Checkpoints as folders: what is in one, whether it is a checkpoint, and removing it.

Removing keeps to three rules, so that it never takes what another save or reader needs:

- A manifest is removed only if it is the one that was looked at.
- Of the files, those go that this manifest named, by names that only this format gives.
- Files that no manifest names may be those of a save under way: they go when they are old.
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
from lightning_shard.checkpoint.store import LocalStore, Stamp, Store, open_store
from lightning_shard.errors import CheckpointConflictError, CheckpointError

LEFTOVER_AGE_S = 3600.0
"""So long after its newest file was written, an attempt that hasn't been committed is taken for a crashed one's."""

# Found in text, not parsed: so it works for manifests that are torn or of a later version, too.
_OURS = re.compile(rb'"format"\s*:\s*"lightning_shard"')
_NAMED = re.compile(rb'"path"\s*:\s*"(' + OWN_FILE.pattern.encode() + rb')"')
_ATTEMPT = re.compile(rb'"attempt"\s*:\s*"([^"]*)"')
_BLANK = b"\0 \t\r\n"
_TEMPORARY = re.compile(rf"(?:{re.escape(MANIFEST_NAME)}|{OWN_FILE.pattern})\.(?:\d+-[0-9a-f]{{8}}\.)?tmp")


@dataclass(frozen=True)
class Earlier:
    """What is at a path before something is done there: the manifest's stamp, its attempt, the files that it names."""

    stamp: Stamp | None = None
    attempt: str = ""
    files: frozenset[str] = frozenset()


def look(store: Store) -> Earlier:
    """The manifest that is there now, also a damaged one of ours: a torn or empty manifest is no checkpoint.

    Raises:
        CheckpointError: There is a ``manifest.json`` of another program.
    """
    data = b""
    stamp, seen = store.stamp(MANIFEST_NAME), None
    while stamp is not None and stamp != seen:  # until what was read is what the stamp is of
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
    """The files that a manifest names, of those that only this format gives such names."""
    return frozenset(match[1].decode() for match in _NAMED.finditer(manifest))


def remove(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> None:
    """Remove a checkpoint: its manifest first, so that a half-removed one is none; nothing if none is there.

    Only files that it names are removed, leftovers of crashed saves that are older than an hour, and the format's own
    folders if they are empty then. Of a symbolic link, only the link is removed. What another save commits meanwhile
    stays.

    Raises:
        CheckpointError: There is a ``manifest.json`` of another program.
    """
    _remove(open_store(path, storage_options), None)


def remove_attempt(path: str | os.PathLike[str], attempt: str, storage_options: dict[str, Any] | None) -> bool:
    """The same of a checkpoint that was looked at before, unless another has taken its place since; whether it went."""
    return _remove(open_store(path, storage_options), attempt)


def _remove(store: Store, attempt: str | None) -> bool:
    if isinstance(store, LocalStore) and os.path.islink(store.root):
        if store.exists(MANIFEST_NAME) or not os.path.exists(store.root):
            os.unlink(store.root)
        return attempt is None
    earlier = look(store)
    if attempt is not None and earlier.attempt != attempt:
        return False
    if earlier.stamp is not None:
        try:
            store.remove(MANIFEST_NAME, only=earlier.stamp)
        except CheckpointConflictError:
            return False  # a save has just replaced it, which removes what it has replaced
    remove_files(store, earlier.files)
    if not store.exists(MANIFEST_NAME):
        remove_leftovers(store, clock=lambda: _clock(store))
        store.remove_empty_folders()
    return True


def exists(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> bool:
    """Whether a committed checkpoint is at the path: its manifest is."""
    return open_store(path, storage_options).exists(MANIFEST_NAME)


def remove_files(store: Store, names: Iterable[str]) -> None:
    """Remove files; a failure to is no failure of the checkpoint."""
    for name in sorted(names):
        with contextlib.suppress(Exception):
            store.remove(name)


def remove_leftovers(store: Store, *, keep: Iterable[str] = (), clock: Callable[[], float | None]) -> None:
    """Remove what crashed saves have left; a failure to is no failure of the checkpoint.

    Args:
        keep: The files that the manifest names.
        clock: Gives the time by the store's own clock; asked only where there are leftovers.
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
    """The time by the store's own clock, which may differ from this machine's: when an empty file was written."""
    name = f"{MANIFEST_NAME}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        store.write(name, [], 0, durable=False)
        return store.modified(name)
    finally:
        store.remove(name)
