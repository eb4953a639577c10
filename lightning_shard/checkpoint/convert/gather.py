"""``gather``: a checkpoint to what other programs read, in bounded memory, on one process or on all ranks together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lightning_shard.checkpoint.convert import export
from lightning_shard.checkpoint.convert.write import Progress, deliver
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.checkpoint.loading.open import read_together, starting_over
from lightning_shard.checkpoint.names import Rename
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.store import Store, as_path, open_store
from lightning_shard.errors import CheckpointError

Format = Literal["safetensors", "transformers", "lightning"]


@dataclass(frozen=True)
class GatherReport:
    """What was written: ``bytes`` of tensors, of how many ``tensors``, into which ``files``."""

    files: list[str]
    tensors: int
    bytes: int


@starting_over
def gather(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: Format | None = None,
    optimizer: bool | None = None,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    strip_prefix: str | None = None,
    rename: Rename | None = None,
    config: Any = None,
    base: str | os.PathLike[str] | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    out_storage_options: dict[str, Any] | None = None,
    fsync: bool = True,
    progress: Progress | None = None,
    group: Any = None,
) -> GatherReport:
    """Write a checkpoint as other programs read it. With a process group, a collective call: the ranks share the work.

    It needs neither a process group nor the program that saved. Files of a local disk appear when all are complete; on
    other stores each appears when it is, an index last.

    Args:
        path: The checkpoint, or another program's: see :func:`read`.
        out: The file to write; for ``"transformers"`` the folder.
        format: ``"safetensors"``: one file, or several with an index. Tensors that shared memory are written under each
            name. ``"transformers"``: a folder that ``from_pretrained`` loads: ``config.json``, the tokenizer's files
            where the module had one, and the weights of the transformers model that the module holds, under its own
            names. ``"lightning"``: a file that plain Trainers resume from and ``load_from_checkpoint`` reads (a pickle,
            which nothing here ever reads as one). Default: ``"lightning"`` where ``out`` ends with ``.ckpt``, else
            ``"safetensors"``.
        optimizer: Write the training's state too: in safetensors the optimizer's tensors, their names prefixed with
            ``optimizer.``; in a ``.ckpt``, where it is the default, all that a resuming Trainer needs.
        max_shard_bytes: Write several safetensors files, with at most so many bytes of tensors in one (where one tensor
            alone isn't larger): ``model.safetensors`` gives ``model-00001-of-00002.safetensors`` and so on, and
            ``model.safetensors.index.json``.
        dtype: Convert the model's floating tensors.
        strip_prefix: Taken off the names of the model's tensors that have it. For ``"transformers"`` the prefix of the
            model to write, found where the module held one.
        rename: For the names after that: beginnings and what takes their place, such as ``{"old.": "new."}``, or a
            function that gives the new name, or None to leave the tensor out. The optimizer's names stay.
        config: For ``"transformers"``, where the checkpoint has none: a transformers config, or a folder that has
            ``config.json`` (and perhaps a tokenizer's files).
        base: Where frozen tensors are that the checkpoint leaves out; by default where it says that they came from.
            They are read once more, to see that they are the same.
        verify: Check digests.
        out_storage_options: For fsspec, if ``out`` is a URL.
        progress: Called now and then with this rank's bytes done and those that it will have done in all.
        group: The ranks that gather together. Default: all.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`; no file of a local disk
            appears then.
        StateMismatchError: Two tensors would have one name, or no name begins with ``strip_prefix``.
        CheckpointError: The format asks for what the checkpoint hasn't; several files are to be written where one of
            the whole model is, which readers would take instead; or a disk or a store failed. A file that was at
            ``out`` before stays then, or is replaced as a whole.
    """
    ranks = Ranks.of(group)
    as_path(out)  # refuses what no path may be
    target = os.fspath(out)
    if format is None:
        format = "lightning" if target.endswith(".ckpt") else "safetensors"
    if format not in get_args(Format):
        raise CheckpointError(f"format ({format!r}) must be one of {', '.join(get_args(Format))}.")
    with _as_ours(path, target):
        checkpoint = read_together(path, storage_options=storage_options, verify=verify, group=group)
        # what takes the trainer state is found by the first rank, and said to the others
        plan: Any = None
        with all_or_none(group):
            checkpoint = complete(checkpoint, base, storage_options=storage_options, ranks=ranks)
            if format == "transformers" and optimizer:
                raise CheckpointError("format='transformers' has no place for an optimizer: leave out optimizer=True.")
            naming = export.Naming(dtype, strip_prefix, rename)
            folder, name = (target.rstrip("/"), "") if format == "transformers" else _split(target)
            store = open_store(folder, out_storage_options)
            if ranks.first and format == "transformers":
                plan = export.pretrained(checkpoint, strip_prefix, config, storage_options)
            elif ranks.first and format == "lightning":
                plan = export.plan_lightning(checkpoint, naming, optimizer=optimizer is not False)
        plan = ranks.broadcast(plan)
        with all_or_none(group):
            if format == "transformers":
                bundle = export.transformers(checkpoint, plan, naming, max_shard_bytes)
            elif format == "lightning":
                bundle = export.lightning(checkpoint, name, naming, plan)
            else:
                bundle = export.safetensors(checkpoint, name, naming, max_shard_bytes, optimizer=bool(optimizer))
            if ranks.first:
                _refuse_older(store, bundle)
        with checkpoint.saying_if_replaced():
            deliver(store, bundle.files, ranks, durable=fsync, progress=progress)
        with all_or_none(group):
            for small, data in bundle.small.items() if ranks.first else ():
                store.publish(small, [memoryview(data)], len(data), durable=fsync)
    sources = bundle.sources
    files = [f"{folder}/{file}" for file in (*(file.name for file in bundle.files), *bundle.small)]
    return GatherReport(files, len(sources), sum(source.nbytes for source in sources))


@contextlib.contextmanager
def _as_ours(path: str | os.PathLike[str], out: str) -> Iterator[None]:
    """What a disk or a store fails with, on this rank, as an error of ours that names both places."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{os.fspath(path)} could not be gathered to {out}: {error}.") from error


def _refuse_older(store: Store, bundle: export.Bundle) -> None:
    """Where an index is to stand beside one file of the whole model, of an earlier export: readers take that file."""
    for name in bundle.small:
        whole = name.removesuffix(".index.json")
        if whole != name and store.exists(whole):
            raise CheckpointError(
                f"{store.root}/{whole} is a file of a whole model, which would be read in place of the several that"
                " max_shard_bytes asks for: remove it, or gather to another folder."
            )


def _split(out: str) -> tuple[str, str]:
    folder, _, name = out.rpartition("/")
    if not name or os.path.isdir(out):
        raise CheckpointError(f"out ({out!r}) must be a file to write, such as {out.rstrip('/')}/model.safetensors.")
    return folder or ("/" if out.startswith("/") else "."), name
