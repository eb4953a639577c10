"""``read``: finds a checkpoint at a path, ours or another program's file, and opens it.

Where ranks read together, only the first rank finds it, and broadcasts the manifest and the table of chunks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from lightning_shard.checkpoint.foreign import files as foreign
from lightning_shard.checkpoint.foreign.files import NOT_A_FILE, Found
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from lightning_shard.checkpoint.format.table import Table
from lightning_shard.checkpoint.loading.ranges import naming_what_fails
from lightning_shard.checkpoint.loading.stored import TRUSTED_BYTES, Checkpoint, saying_if_replaced
from lightning_shard.checkpoint.ranks import Ranks, all_or_none, raised_by_all, together
from lightning_shard.checkpoint.store import Store, as_path, open_store
from lightning_shard.checkpoint.store.protocol import too_short
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    ShardError,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def read(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, verify: bool = True
) -> Checkpoint:
    """Open a checkpoint by its directory, or by the path of its manifest. Reads only the manifest.

    Other programs' files can be read, too: a safetensors file; a folder with ``model.safetensors`` or its index, as
    transformers writes them; and a file of ``torch.save``, such as Lightning's ``.ckpt``, from which only tensors and
    plain values are read (``weights_only=True``). These have no digests.

    Raises:
        CheckpointNotFoundError: There is neither a manifest nor such a file.
        FormatVersionError: Written by a newer version of the format.
        CorruptCheckpointError: The manifest, or the other file's header, is damaged.
        CheckpointError: A torch file that can't be read without running code that it names.
    """
    return open_found(as_path(path), storage_options, verify, find(as_path(path), storage_options))


def open_found(path: str, storage_options: dict[str, Any] | None, verify: bool, found: Found) -> Checkpoint:
    """Open the checkpoint that :func:`find` has found at a path, on this rank or on another one."""
    store = open_store(found.root, storage_options)
    # other programs' folders may consist of symbolic links, such as the cache of Hugging Face's hub
    store.links_lead_anywhere = found.foreign
    source = path if found.foreign else f"{path}/{MANIFEST_NAME}"
    manifest = Manifest.from_bytes(found.manifest, source, foreign=found.foreign)
    manifest.take_table(_table(store, manifest, path, found.table))
    if not manifest.signed:
        warnings.warn(
            f"{source} has no digest of its own (written by {manifest.writer or 'an unnamed writer'}), so damage to it"
            " may go unnoticed. Saving the checkpoint again adds one.",
            stacklevel=3,
        )
    return Checkpoint(path, store, manifest, verify, found.state)


def _table(store: Store, manifest: Manifest, path: str, given: bytes | None = None) -> Table:
    """The table of a manifest, whose file is read when it is needed, unless its bytes are given."""
    name, nbytes = manifest.table.path, manifest.table.bytes

    def load() -> bytes | bytearray:
        if given is not None:
            return given
        with saying_if_replaced(store, path, manifest.attempt), naming_what_fails(store, name):
            if nbytes > TRUSTED_BYTES and store.size(name) < nbytes:
                raise too_short(name, nbytes)
            data = memoryview(bytearray(nbytes))
            with store.reading(name) as read:
                for begin in range(0, nbytes, store.step_bytes):
                    read([(begin, data[begin : begin + store.step_bytes])])
        return data.obj  # type: ignore[return-value]

    return Table(manifest.table, f"{path}/{name}", load)


def read_together(
    path: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    verify: bool = True,
    group: Any = None,
) -> Checkpoint:
    """As :func:`read`, but only the first rank reads the manifest, and broadcasts it. A collective call."""
    root, ranks = as_path(path), Ranks.of(group)
    found = together(ranks, lambda: None, lambda _: find(root, storage_options, with_table=not ranks.alone))
    with all_or_none(group):
        return open_found(root, storage_options, verify, found)


def starting_over(collective: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator: run a collective that opens and reads a checkpoint once more if the checkpoint is replaced meanwhile.

    Only errors that all ranks of ``group`` raise count; an error of one rank alone is raised unchanged.
    """

    @wraps(collective)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return collective(*args, **kwargs)
        except BaseException as error:
            if not raised_by_all(error):
                raise
            replaced, _ = Ranks.of(kwargs.get("group")).any(isinstance(error, CheckpointReplacedError), False)
            if not replaced:
                raise
        return collective(*args, **kwargs)

    return call


def find(path: str, storage_options: dict[str, Any] | None, *, with_table: bool = False) -> Found:
    """Find the checkpoint at a path: one with a manifest, else another program's file.

    Args:
        with_table: Read the table's bytes too, for other ranks.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointError: There is one that can't be read.
    """
    try:
        store = open_store(path, storage_options)
        try:
            store.links_lead_anywhere = False
            found: Found | None = Found(path, store.read(MANIFEST_NAME))
        except NOT_A_FILE:
            found = foreign.find(path, storage_options)
    except ShardError:
        raise
    except Exception as error:  # from the OS: no permission, a name that is too long; from a store: anything
        raise CheckpointError(f"{path:.200} can't be read: {type(error).__name__}: {error}") from error
    if found is None:
        raise CheckpointNotFoundError(
            f"{path} holds no committed checkpoint: there is no {MANIFEST_NAME}. {_what_is_there(path, store)}"
        )
    if with_table and found.table is None:
        manifest = Manifest.from_bytes(found.manifest, f"{path}/{MANIFEST_NAME}")
        found = found._replace(table=bytes(_table(store, manifest, path).data))
    return found


def _what_is_there(path: str, store: Store) -> str:
    try:
        names = store.names()
    except Exception:
        names = []
    if not names:
        if os.path.isfile(path):
            return "It is a single file, and neither safetensors nor a zip of torch.save."
        return "It is a folder without files." if os.path.isdir(path) else "Nothing is there: check the path."
    if ".metadata" in names:
        return "It is a checkpoint of torch.distributed.checkpoint: load it with that."
    if any(name.startswith(("model/", "optimizer/", "trainer/")) for name in names):
        return "It has files of a save that was not completed: use an earlier checkpoint."
    endings = "/" + MANIFEST_NAME, ".safetensors", ".bin", ".ckpt", ".pt", ".pth"
    if inside := [name for name in names if name.endswith(endings)]:
        return f"But there is {inside[-1]} in it: did you mean that?"
    return f"It holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}."
