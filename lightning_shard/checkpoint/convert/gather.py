"""``gather``: writes a checkpoint in other programs' formats, in bounded memory, on one process or on all ranks."""

from __future__ import annotations

import os
import posixpath
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lightning_shard.arguments import check_count, few
from lightning_shard.checkpoint.convert import export
from lightning_shard.checkpoint.convert.write import Progress, deliver
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.checkpoint.format.header import CARRIERS, DTYPES
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, OWN_FILE
from lightning_shard.checkpoint.loading.open import read_together, starting_over
from lightning_shard.checkpoint.names import Rename
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.store import Store, as_path, as_text, local_path, open_store, parted
from lightning_shard.checkpoint.store.calls import told_as
from lightning_shard.errors import CheckpointError

INDEX_ENDS = ".index.json"
"""How the name of an index of safetensors files ends."""
Format = Literal["safetensors", "transformers", "lightning"]
_READ_AS: dict[str, Format] = {
    ".safetensors": "safetensors",
    ".ckpt": "lightning",
    ".pt": "lightning",
    ".pth": "lightning",
    ".bin": "lightning",
}
"""By the endings of files, as what readers take them."""


@dataclass(frozen=True)
class GatherReport:
    """What was written: the paths of ``files``, the number of ``tensors``, and their ``bytes``."""

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
    """Write a checkpoint in another program's format. With a process group, a collective call: ranks share the files.

    It needs neither a process group nor the program that saved. A file appears when it is complete, an index last.

    Args:
        path: The checkpoint, or another program's: see :func:`read`.
        out: The file to write; for ``"transformers"`` the folder.
        format: ``"safetensors"``: one file, or several with an index. Tensors that shared memory are written under each
            name. Of dtypes that safetensors lacks (complex128, complex32, float8_e8m0fnu) it gets the bytes as another,
            with a warning. ``"transformers"``: a folder that ``from_pretrained`` loads, with ``config.json``, the
            tokenizer's files if the module had one, and the weights of the transformers model that the module holds,
            under that model's own names. ``"lightning"``: a file that plain Trainers resume from and
            ``load_from_checkpoint`` reads (a pickle, which nothing here ever unpickles). Default: told by the ending of
            ``out``, ``.safetensors`` or ``.ckpt``.
        optimizer: Write training state, too: in safetensors the optimizer's tensors, with names prefixed by
            ``optimizer.``; in a ``.ckpt``, where it is the default, all that a resuming Trainer needs.
        max_shard_bytes: Write several safetensors files, each with at most so many bytes of tensors (or one larger
            tensor): ``model.safetensors`` gives ``model-00001-of-00002.safetensors`` and so on, and
            ``model.safetensors.index.json``.
        dtype: Convert the model's floating tensors to it.
        strip_prefix: Removed from the names of the model's tensors that have it. For ``"transformers"``, the prefix of
            the model to write; found automatically where the module held one model.
        rename: Applied to the names after that: a mapping from prefixes to replacements, such as ``{"old.": "new."}``;
            or a function that returns the new name, or None to leave the tensor out. The optimizer's names stay.
        config: For ``"transformers"``, if the checkpoint has no config: a transformers config, or a folder that has
            ``config.json`` (and perhaps a tokenizer's files).
        base: A checkpoint or file with the frozen tensors that the checkpoint leaves out; by default the place that the
            checkpoint records for them. They are read once more, to check that they are the same.
        verify: Check digests.
        storage_options: For fsspec, if ``path`` is a URL.
        out_storage_options: For fsspec, if ``out`` is a URL.
        fsync: Sync local files before they appear.
        progress: Called repeatedly with this rank's bytes done and its total bytes.
        group: The ranks that gather together. Default: all.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`; the file that would hold
            what is damaged doesn't appear.
        StateMismatchError: Two tensors would get the same name; no name begins with ``strip_prefix``, or with a prefix
            that ``rename`` maps; or ``rename`` leaves out all tensors.
        UnsupportedStateError: safetensors can't hold one of the new names.
        ConfigurationError: ``max_shard_bytes`` is no integer from 1.
        CheckpointError: The format has no use for an argument, or needs something that the checkpoint lacks; ``out``
            has no ending that tells of a format, or that of another, or is named as a checkpoint's own files are;
            several files are to be written next to a file of a whole model, which readers would take instead; or a disk
            or a store failed. An earlier file at ``out`` then stays, or has been replaced as a whole. Of several files
            with an index, the earlier index stays, or there is none.
    """
    ranks = Ranks.of(group)
    target = as_text(out, "out")
    _refuse_name(target)
    if format is not None and format not in get_args(Format):
        raise CheckpointError(f"format ({format!r}) must be one of {', '.join(get_args(Format))}.")
    format = _format_of(target, format)
    _refuse_without_effect(format, max_shard_bytes, config)
    with told_as(f"{as_text(path)} could not be gathered to {target}"):
        checkpoint = read_together(path, storage_options=storage_options, verify=verify, group=group)
        # only the first rank reads the trainer state; it broadcasts the plan
        plan: Any = None
        with all_or_none(group):
            checkpoint = complete(checkpoint, base, storage_options=storage_options, ranks=ranks)
            if format == "transformers" and optimizer:
                raise CheckpointError("format='transformers' has no place for an optimizer: leave out optimizer=True.")
            naming = export.Naming(dtype, strip_prefix, rename)
            folder, name = (as_path(target), "") if format == "transformers" else _split(target)
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
                if format != "lightning":
                    _tell_of_carriers(bundle)
                _retract_index(store, bundle, durable=fsync)
        with checkpoint.saying_if_replaced():
            deliver(store, bundle.files, ranks, durable=fsync, progress=progress)
        with all_or_none(group):
            for small, data in bundle.small.items() if ranks.first else ():
                store.publish(small, [memoryview(data)], len(data), durable=fsync)
    sources = bundle.sources
    files = [posixpath.join(folder, file) for file in (*(file.name for file in bundle.files), *bundle.small)]
    return GatherReport(files, len(sources), sum(source.nbytes for source in sources))


def _format_of(out: str, format: Format | None) -> Format:
    """The format: by default the one that ``out`` ends with, and none that readers wouldn't expect by its ending."""
    ending = posixpath.splitext(out)[1]
    read_as = _READ_AS.get(ending)
    guessed = format is None and ending not in (".safetensors", ".ckpt")
    if guessed or (format not in ("transformers", read_as) and None not in (format, read_as)):
        raise CheckpointError(
            f"out ({out!r}) must end with .safetensors, or with .ckpt for a torch file as Lightning's; for a folder"
            " that from_pretrained loads, pass format='transformers'."
        )
    return format or _READ_AS[ending]


def _refuse_without_effect(format: Format, max_shard_bytes: Any, config: Any) -> None:
    """Refuse arguments that the format has no use for: what is written wouldn't be what was asked for."""
    if max_shard_bytes is not None:
        check_count("max_shard_bytes", max_shard_bytes)
        if format == "lightning":
            raise CheckpointError(
                "format='lightning' writes one file, a .ckpt: leave out max_shard_bytes, or write format='safetensors'."
            )
    if config is not None and format != "transformers":
        raise CheckpointError(
            f"format={format!r} has no place for a config: leave out config=, or write format='transformers'."
        )


def _refuse_name(out: str) -> None:
    """Refuse a name of a checkpoint's own files, which would be destroyed; and of an index, which this file isn't."""
    local = local_path(out)
    folder, name = (out if local is None else os.path.abspath(local)).split("/")[-2:]
    if name == MANIFEST_NAME or any(map(OWN_FILE.fullmatch, (name, f"{folder}/{name}"))):
        raise CheckpointError(
            f"out ({out!r}) is the name of a checkpoint's own file, which would be overwritten: choose another name."
        )
    if name.endswith(INDEX_ENDS):
        raise CheckpointError(
            f"out ({out!r}) is named as an index of several files, and would be read as one: name the file, such as"
            f" {name.removesuffix(INDEX_ENDS)}, and give max_shard_bytes for several with an index."
        )


def _refuse_older(store: Store, bundle: export.Bundle) -> None:
    """Refuse to write an index next to an earlier export's file of the whole model, which readers would prefer."""
    for name in bundle.small:
        whole = name.removesuffix(INDEX_ENDS)
        if whole != name and store.exists(whole):
            raise CheckpointError(
                f"{store.root}/{whole} is a file of a whole model, which would be read in place of the several that"
                " max_shard_bytes asks for: remove it, or gather to another folder."
            )


def _retract_index(store: Store, bundle: export.Bundle, *, durable: bool) -> None:
    """Remove an earlier export's index of files that are about to be replaced: until all of them are, readers that
    follow it would mix two models."""
    if not any(store.exists(file.name) for file in bundle.files):
        return
    for name in bundle.small:
        if name.endswith(INDEX_ENDS) and store.exists(name):
            store.remove(name)
            if durable:
                store.sync([name])


def _tell_of_carriers(bundle: export.Bundle) -> None:
    """Warn of tensors that aren't read as what they are, since safetensors has no name for their dtypes."""
    for name, (carrier, extra) in CARRIERS.items():
        own = [source.stored.name for source in bundle.sources if source.dtype == DTYPES[name]]
        if own:
            shape = f" with a last dim of {extra[0]}" if extra else ", byte for byte"
            warnings.warn(
                f"{few(map(repr, own), 1)} of dtype {DTYPES[name]} will be read as {DTYPES[carrier]}{shape}:"
                " safetensors has no name for it. Gather to a .ckpt to keep it.",
                stacklevel=4,
            )


def _split(out: str) -> tuple[str, str]:
    folder, name = parted(out)
    local = local_path(out)
    if not name or (local is not None and os.path.isdir(local)):
        raise CheckpointError(f"out ({out!r}) must be a file to write, such as {out.rstrip('/')}/model.safetensors.")
    return folder, name
