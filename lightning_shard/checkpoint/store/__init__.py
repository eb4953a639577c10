"""Where checkpoints lie: local disk, or any place that fsspec knows, behind the few verbs of :class:`Store`.

Paths are ``str`` throughout: ``pathlib`` turns ``s3://a/b`` into ``s3:/a/b``.
"""

from __future__ import annotations

import os
import re
from typing import Any

from lightning_shard.checkpoint.store.credentials import refuse_secrets
from lightning_shard.checkpoint.store.local import LocalStore
from lightning_shard.checkpoint.store.protocol import ANYTHING, Buffer, Reader, Segment, Stamp, Store
from lightning_shard.errors import CheckpointError

__all__ = [
    "ANYTHING",
    "Buffer",
    "LocalStore",
    "Reader",
    "Segment",
    "Stamp",
    "Store",
    "absolute",
    "as_path",
    "forget_listings",
    "open_filesystem",
    "open_store",
]


_CUT_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)")


def open_store(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Store:
    """The store for a directory: local disk, or whatever fsspec has for the path's protocol.

    Args:
        storage_options: For fsspec. ``stall_s`` is taken out: the seconds after which a call of a remote store that has
            no answer has stalled (default 60). It is made again then, and given up after three times as long.

    Raises:
        CheckpointError: No such path can be: an unknown protocol, a package that isn't there, a URL with a password, a
            token or a signature.
    """
    root = as_path(path)
    scheme = root.partition("://")[0] if "://" in root else ""
    if "::" not in root:
        if scheme in ("", "file", "local"):
            return LocalStore(root.partition("://")[2] if scheme else root)
        if scheme in ("s3", "s3a"):
            from lightning_shard.checkpoint.store.s3 import S3Store

            return S3Store(root, storage_options or {})
    from lightning_shard.checkpoint.store.remote import RemoteStore

    return RemoteStore(root, storage_options or {})


def open_filesystem(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """The fsspec filesystem of a store, and the path as that names it: for the folders that checkpoints lie in.

    Raises:
        CheckpointError: As :func:`open_store`.
    """
    import fsspec

    from lightning_shard.checkpoint.store.remote import RemoteStore

    store = open_store(path, storage_options)
    if isinstance(store, RemoteStore):
        return store.fs, store.base
    return fsspec.filesystem("file"), os.path.abspath(store.root)


def forget_listings(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> None:
    """Other filesystems of this kind in this process look anew: they may have cached what was in a folder before.

    Private parts of fsspec 2026.9 used: ``_cache``, a class's instances.
    """
    filesystem, _ = open_filesystem(path, storage_options)
    for one in list(type(filesystem)._cache.values()):
        one.invalidate_cache()


def as_path(path: str | os.PathLike[str]) -> str:
    """A path as text, without a trailing slash, and without the manifest's name if it is the manifest's own path."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise CheckpointError(f"path ({path!r}) must be a str or a path that gives one.")
    if not text:
        raise CheckpointError("path is empty: name the checkpoint's directory.")
    if _CUT_URL.match(text):
        raise CheckpointError(
            f"path ({text}) was a URL before it was made a Path, and names a folder of the local disk now: pass it as"
            " a str."
        )
    refuse_secrets(text)
    head, _, tail = text.rpartition("/")
    if tail == "manifest.json":
        text = head or ("/" if text.startswith("/") else ".")
    return text.rstrip("/") or "/"


def absolute(path: str | os.PathLike[str]) -> str:
    """The same, of the local disk from its root: what is done later is done there, wherever the program is by then."""
    text = as_path(path)
    scheme, separator, rest = text.partition("://")
    if "::" in text or (separator and scheme not in ("file", "local")):
        return text
    path = rest if separator else text
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
