"""The commit: one atomic put of the manifest, which turns an attempt's files into the checkpoint.

It is optimistic: only the manifest that was there when the save began is replaced (``docs/decisions/commit.md``).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Sequence

from lightning_shard.arguments import few
from lightning_shard.checkpoint.catalog import LEFTOVER_AGE_S, Earlier, look, remove_files, remove_leftovers
from lightning_shard.checkpoint.engine import each
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from lightning_shard.checkpoint.ranks import FILES_STAY
from lightning_shard.checkpoint.store import Store
from lightning_shard.errors import CheckpointConflictError, CheckpointError

LOOKS, FEW_LOOKS = 16, 64
"""How many files are looked at at once, where there are more than these few."""


def new_attempt() -> str:
    """A random id of 12 hexadecimal digits, unique among the saves to a directory."""
    return secrets.token_hex(6)


def look_before_saving(store: Store) -> Earlier:
    """Note what is at the path when a save begins."""
    if store.folder is not None and os.path.islink(store.folder) and store.exists(MANIFEST_NAME):
        raise CheckpointError(
            f"{store.root} is a symbolic link to the checkpoint {os.path.realpath(store.folder)}, which would be"
            " overwritten: save to another path, or to that one by its own name, or remove the link."
        )
    if store.folder is not None and os.path.isfile(store.folder):
        raise CheckpointError(
            f"{store.root} is a single file, and a checkpoint is a directory: save to another path, or remove the file."
        )
    return look(store)


def check_files(store: Store, files: Sequence[FileEntry], began_s: float | None = None) -> None:
    """Check that files that this rank has just written exist and have their sizes; or, with ``began_s``, all files that
    the manifest will name, just before the commit.

    In a folder the first rank checks all of them again; in a remote store only if so much time has passed that another
    save may have removed them as a crashed save's leftovers.

    Args:
        began_s: When the save began, by ``time.monotonic()``.

    Raises:
        CheckpointError: A file is missing or has another size.
    """
    if began_s is not None and store.is_remote and time.monotonic() - began_s < LEFTOVER_AGE_S / 2:
        return

    def fault(file: FileEntry) -> str:
        try:
            size = store.size(file.path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{file.path} is gone"
        return "" if size == file.bytes else f"{file.path} has {size:,} bytes instead of {file.bytes:,}"

    # a folder may be a network mount, where a look takes a round trip
    looks = each(fault, files, LOOKS if len(files) > FEW_LOOKS else 1)
    if lost := [what for _, what in looks if what]:
        raise CheckpointError(
            f"{store.root}: files that were just written are missing or have another size ({few(lost, 3)}): another"
            " program may be removing files there, or it is a disk of each machine's own. Save to a path that all"
            " machines see; disks of their own may be ShardedCheckpointIO's local= folder, from which saves are carried"
            " to such a path. Nothing has been committed, and an earlier checkpoint is as it was."
        )


def commit(store: Store, manifest: Manifest, earlier: Earlier, *, durable: bool) -> None:
    """Write the table, replace the earlier manifest by this one, and remove the files that it named, and old leftovers.

    Raises:
        CheckpointConflictError: Another save has committed first. Its checkpoint stays.
        BaseException: With the attribute :data:`~lightning_shard.checkpoint.ranks.FILES_STAY`.
    """
    data, table = manifest.to_bytes(), manifest.chunks.table.data
    try:
        # atomically, since another process may be committing the same attempt from a copy of it
        store.publish(manifest.table.path, [memoryview(table)], len(table), durable=durable)
        try:
            store.publish(MANIFEST_NAME, [memoryview(data)], len(data), durable=durable, replaces=earlier.stamp)
        except CheckpointConflictError as error:
            raise CheckpointConflictError(_conflict(store, manifest.attempt)) from error
        keep = {manifest.table.path, *(file.path for file in manifest.files)}
        remove_files(store, earlier.files - keep)
        remove_leftovers(store, keep=keep, clock=lambda: store.modified(MANIFEST_NAME))
    except BaseException as error:
        setattr(error, FILES_STAY, _may_be_committed(store, manifest.attempt, error))
        raise


def _conflict(store: Store, attempt: str) -> str:
    who = "a manifest that can't be read"
    with contextlib.suppress(Exception):
        there = json.loads(store.read(MANIFEST_NAME))
        who = f"attempt {there['attempt']} of {there['world_size']} ranks ({there['writer']})"
    return (
        f"{store.root}: another save was committed to this path while this one was running: {who}, which wasn't there"
        f" when this save (attempt {attempt}) began. It is kept, and what this save wrote is discarded: stop one of the"
        " two jobs, or give each a path of its own."
    )


def _may_be_committed(store: Store, attempt: str, error: BaseException) -> bool:
    """Whether the manifest is, or may still become, visible although putting it raised ``error``.

    After a conflict the manifest itself is read, since a store's report of a conflict is less reliable.
    """
    if store.folder is None and not isinstance(error, CheckpointConflictError):
        return True  # the response may have been lost, not the request
    try:
        return Manifest.from_bytes(store.read(MANIFEST_NAME)).attempt == attempt
    except FileNotFoundError:
        return False
    except Exception:
        return True
