"""Replaces local checkpoints, which are folders, by a link or a file of the same name: one is found at any moment."""

from __future__ import annotations

import contextlib
import os
import shutil
from itertools import count

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.checkpoint.folder import remove
from lightning_shard.checkpoint.store import LocalStore


def put_link(path: str, link: str, *, durable: bool) -> None:
    """Atomically replace a link by a link, or replace a folder, which is called its next version for a moment.

    So if the process is killed, a checkpoint of one of these names is found. The newest checkpoint may be the folder.

    Args:
        durable: Sync the link, since what it led to is removed next: else a power cut could leave the link as it was,
            and what it leads to removed.
    """
    if path == link:
        return
    folder, name = os.path.split(link)
    new = os.path.join(folder, f".{name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    os.symlink(os.path.relpath(path, folder), new)
    if os.path.islink(link) or not os.path.isdir(link):
        _replace(new, link, durable=durable)
        return
    aside = next_version(link)
    os.rename(link, aside)
    _replace(new, link, durable=durable)
    remove_folder(aside)


def next_version(path: str) -> str:
    """The first free path that Lightning's callbacks would take after this one, and find as its later version."""
    stem, extension = os.path.splitext(path)
    versions = (f"{stem}{ModelCheckpoint.CHECKPOINT_JOIN_CHAR}v{number}{extension}" for number in count(1))
    return next(version for version in versions if not os.path.lexists(version))


def remove_folder(path: str) -> None:
    """Remove a local checkpoint and its folder, whatever else is in it."""
    remove(path)  # removes the manifest first, then the folder
    if os.path.isdir(path):
        shutil.rmtree(path)


def _replace(new: str, link: str, *, durable: bool) -> None:
    os.replace(new, link)
    if durable:
        LocalStore(os.path.dirname(link)).sync([os.path.basename(link)])
