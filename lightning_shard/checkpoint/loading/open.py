"""``read``: find a checkpoint at a path, and open it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from lightning_shard.checkpoint.foreign import files as foreign
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from lightning_shard.checkpoint.loading.stored import Checkpoint
from lightning_shard.checkpoint.ranks import Ranks, RanksLost, all_or_none, together
from lightning_shard.checkpoint.store import Store, as_path, open_store
from lightning_shard.errors import CheckpointNotFoundError, CheckpointReplacedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def read(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, verify: bool = True
) -> Checkpoint:
    """Open a checkpoint by its directory, or by the path of its manifest. Reads the manifest only.

    Other programs' files open too, to read: a safetensors file, a folder with ``model.safetensors`` or its index, as
    transformers writes them, and a file of ``torch.save``, such as Lightning's ``.ckpt``, of which only plain values
    and tensors are read (``weights_only=True``). They have no digests.

    Raises:
        CheckpointNotFoundError: No manifest there, nor such a file.
        FormatVersionError: Written by a newer version of the format.
        CorruptCheckpointError: The manifest, or the other file's header, is damaged.
        CheckpointError: A torch file that can't be read without running code that it names.
    """
    return open_found(as_path(path), storage_options, verify, find(as_path(path), storage_options))


def open_found(path: str, storage_options: dict[str, Any] | None, verify: bool, found: Found) -> Checkpoint:
    """The checkpoint at a path, of which :func:`find` has found the rest, here or on another rank."""
    root, data, state = found
    manifest = Manifest.from_bytes(data, f"{path}/{MANIFEST_NAME}" if root == path else path)
    return Checkpoint(path, open_store(root, storage_options), manifest, verify, state)


def read_together(
    path: str | os.PathLike[str],
    *,
    storage_options: dict[str, Any] | None = None,
    verify: bool = True,
    group: Any = None,
) -> Checkpoint:
    """As :func:`read`, but only the first rank reads the manifest, for all. A collective call."""
    root = as_path(path)
    found = together(Ranks.of(group), lambda: None, lambda _: find(root, storage_options))
    with all_or_none(group):
        return open_found(root, storage_options, verify, found)


def starting_over(collective: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Have a call that opens and reads a checkpoint on the ranks of ``group`` start over once, if it is replaced then.

    The call must fail on all ranks if it fails on one.
    """

    @wraps(collective)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return collective(*args, **kwargs)
        except RanksLost:
            raise
        except BaseException as error:
            replaced, _ = Ranks.of(kwargs.get("group")).any(isinstance(error, CheckpointReplacedError), False)
            if not replaced:
                raise
        return collective(*args, **kwargs)

    return call


Found = tuple[str, bytes, Any]
"""The directory of a checkpoint's files, its manifest's bytes, and its state if it isn't in a file of its own."""


def find(path: str, storage_options: dict[str, Any] | None) -> Found:
    store = open_store(path, storage_options)
    try:
        return path, store.read(MANIFEST_NAME), None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        found = foreign.find(path, storage_options)
    if found is None:
        raise CheckpointNotFoundError(
            f"{path} holds no committed checkpoint: there is no {MANIFEST_NAME}. {_what_is_there(path, store)}"
        )
    return found.store.root, found.manifest.to_bytes(), found.state


def _what_is_there(path: str, store: Store) -> str:
    try:
        names = store.names()
    except Exception:
        names = []
    if not names:
        kind = "a single file" if os.path.isfile(path) else "a folder without files" if os.path.isdir(path) else ""
        if kind == "a single file":
            return "It is a single file, and neither safetensors nor a zip of torch.save."
        return f"It is {kind}." if kind else "Nothing is there: check the path."
    if ".metadata" in names:
        return "It is a checkpoint of torch.distributed.checkpoint: load it with that."
    if "pytorch_model.bin.index.json" in names:
        return "It is a model in several files of torch.save: save it anew as safetensors (save_pretrained)."
    single = [
        name for name in names if name.endswith((".safetensors", ".bin", ".ckpt", ".pt", ".pth")) and "/" not in name
    ]
    if single:
        return f"But there is {single[0]} in it: pass that file's own path."
    children = sorted({name.rpartition("/")[0] for name in names if name.endswith("/" + MANIFEST_NAME)})
    if children:
        return f"But there is one in {children[-1]!r} below it: did you mean that?"
    if any(name.startswith(("model/", "optimizer/", "trainer/")) for name in names):
        return "It has files of a save that was not completed: use an earlier checkpoint."
    return f"It holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}."
