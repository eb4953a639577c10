"""Checkpoints as folders: whether one is there, and removing it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE
from lightning_shard.checkpoint.store import Store, open_store


def remove(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> None:
    """Remove a checkpoint: its manifest first, so that a half-removed one is none; nothing if none is there.

    Only files that this package wrote are removed, by their names, and folders that are empty then.
    """
    store = open_store(path, storage_options)
    store.remove(MANIFEST_NAME)
    remove_own_files(store, lambda name: True)
    store.remove_empty_folders()


def remove_own_files(store: Store, which: Callable[[str], bool]) -> None:
    """Remove files that have a name that only this package gives; a failure to is no failure of the checkpoint."""
    with contextlib.suppress(Exception):
        for name in store.names():
            if OWN_FILE.fullmatch(name) and which(name):
                with contextlib.suppress(Exception):
                    store.remove(name)


def exists(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> bool:
    """Whether a committed checkpoint is at the path: its manifest is."""
    return open_store(path, storage_options).exists(MANIFEST_NAME)
