"""Storage of checkpoints: local disk, or any filesystem of fsspec, behind the protocol :class:`Store`.

Paths are ``str`` throughout, since ``pathlib`` turns ``s3://a/b`` into ``s3:/a/b``.
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
    """Open the store for a directory: local disk, or fsspec's filesystem for the path's protocol.

    Args:
        path: A local path, or a URL.
        storage_options: For fsspec, except ``stall_s``: the seconds after which an unanswered call of a remote store
            counts as stalled (default 60). The call is then retried, and given up after three times as long.

    Raises:
        CheckpointError: The path can't be opened: an unknown protocol, a missing package, or a URL with a password, a
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
    """The fsspec filesystem of a store, and its own form of the path. For listing folders of checkpoints.

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
    """Invalidate the listing caches of all filesystem objects of this kind in the process.

    Private part of fsspec 2026.9: ``_cache``, a filesystem class's instances.
    """
    filesystem, _ = open_filesystem(path, storage_options)
    for one in list(type(filesystem)._cache.values()):
        one.invalidate_cache()


def as_path(path: str | os.PathLike[str]) -> str:
    """Normalize a checkpoint's path: to ``str``, without a trailing slash or a trailing ``manifest.json``.

    Raises:
        CheckpointError: No ``str``, empty, a URL that was converted to a ``Path``, or a URL with a secret.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise CheckpointError(f"path ({path!r}) must be a str or a path that gives one.")
    if not text:
        raise CheckpointError("path is empty: name the checkpoint's directory.")
    if _CUT_URL.match(text):
        raise CheckpointError(
            f"path ({text}) looks like a URL that was converted to pathlib.Path, which makes it a local path: pass the"
            " URL as a str."
        )
    refuse_secrets(text)
    head, _, tail = text.rpartition("/")
    if tail == "manifest.json":
        text = head or ("/" if text.startswith("/") else ".")
    return text.rstrip("/") or "/"


def absolute(path: str | os.PathLike[str]) -> str:
    """:func:`as_path`, made absolute if local, so that later use doesn't depend on the working directory."""
    text = as_path(path)
    scheme, separator, rest = text.partition("://")
    if "::" in text or (separator and scheme not in ("file", "local")):
        return text
    path = rest if separator else text
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
