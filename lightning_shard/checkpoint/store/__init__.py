"""Storage of checkpoints: local disk, or any filesystem of fsspec, behind the protocol :class:`Store`.

Paths are ``str`` throughout, since ``pathlib`` turns ``s3://a/b`` into ``s3:/a/b``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_shard.checkpoint.store.local import LocalStore
from lightning_shard.checkpoint.store.paths import absolute as absolute
from lightning_shard.checkpoint.store.paths import as_path, local_path
from lightning_shard.checkpoint.store.paths import as_text as as_text
from lightning_shard.checkpoint.store.paths import parted as parted
from lightning_shard.checkpoint.store.protocol import ANYTHING as ANYTHING
from lightning_shard.checkpoint.store.protocol import Buffer as Buffer
from lightning_shard.checkpoint.store.protocol import Reader as Reader
from lightning_shard.checkpoint.store.protocol import Segment as Segment
from lightning_shard.checkpoint.store.protocol import Stamp as Stamp
from lightning_shard.checkpoint.store.protocol import Store
from lightning_shard.checkpoint.store.protocol import read_range as read_range
from lightning_shard.errors import ConfigurationError


def open_store(path: str | os.PathLike[str], storage_options: dict[str, Any] | None = None) -> Store:
    """Open the store for a directory: local disk, or fsspec's filesystem for the path's protocol.

    Args:
        path: A local path, or a URL.
        storage_options: For fsspec, except ``stall_s``: the seconds after which an unanswered call of a remote store
            counts as stalled (default 60). The call is then retried, and given up after three times as long.

    Raises:
        CheckpointError: The path can't be opened: an unknown protocol, a missing package, or a URL with a password, a
            token or a signature.
        ConfigurationError: ``storage_options`` is no mapping.
    """
    root = as_path(path)
    if storage_options is not None and not isinstance(storage_options, Mapping):  # not shown: they may hold secrets
        raise ConfigurationError(
            f"storage_options ({type(storage_options).__name__}) must be a dict for fsspec, or None."
        )
    local = local_path(root)
    if local is not None:
        return LocalStore(local)
    if root.partition("://")[0] in ("s3", "s3a") and "::" not in root:
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
