"""``load``: any part of a checkpoint into any layout, on one process or on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.loading.open import Found, find, open_found
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.replicas import Assigned, Sharing, Wanted, pass_on
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.memory import narrow
from lightning_shard.checkpoint.names import Rename, new_names
from lightning_shard.checkpoint.ranks import Ranks, all_or_none, together
from lightning_shard.checkpoint.store import as_path, open_store
from lightning_shard.checkpoint.tensors import Located, flatten, identity, locate
from lightning_shard.errors import CheckpointError, StateMismatchError

SHOWN_NAMES = 10
Pair = tuple[StoredTensor, Tensor]
"""What is stored, and the tensor or DTensor to fill with this rank's part of it."""


def load(
    path: str | os.PathLike[str],
    into: Mapping[str, Any] | torch.nn.Module,
    *,
    optimizer: Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    strip_prefix: str | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    share_reads: bool | None = None,
    group: Any = None,
) -> tuple[list[str], list[str]]:
    """Fill the tensors and DTensors of a state, of any layout, in place. With a process group, a collective call.

    Args:
        path: A checkpoint, or another program's file or folder: see :func:`read`.
        into: As ``state`` of :func:`save`; names that differ are told apart before anything is written.
        optimizer: The same for the optimizer's tensors; None leaves those of the checkpoint alone.
        strict: Every name asked for must be in the checkpoint, and every name in it asked for by some rank.
        cast: Convert dtypes where they differ; otherwise that is an error.
        strip_prefix: Taken off the names of the checkpoint's model tensors that have it, to find them in the state.
        rename: For the names after that: beginnings and what takes their place, such as ``{"": "model."}``, or a
            function that gives the new name, or None to leave the tensor alone.
        verify: Check digests.
        share_reads: What several ranks need alike, one of them reads and passes on to the others. None: if the store is
            reached through a network, as object stores are; worth trying on file systems that many machines mount.
        group: The ranks that load together. Default: all.

    Returns:
        The names that were asked for and aren't in the checkpoint, and those in it that weren't asked for. Optimizer
        names are prefixed with ``optimizer:``.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`.
        StateMismatchError: Names (if strict), shapes or dtypes differ; nothing has been written then.
    """
    ranks = Ranks.of(group)
    wanted: dict[str, dict[str, Tensor]] = {}
    missing: list[str] = []
    unexpected: list[str] = []

    def ask() -> list[str]:
        wanted[""] = flatten(into.state_dict(keep_vars=True) if isinstance(into, torch.nn.Module) else into)
        if optimizer is not None:
            wanted["optimizer:"] = flatten(optimizer)
        return [prefix + name for prefix, names in wanted.items() for name in names]

    def find_it(everyone: list[list[str]]) -> tuple[Found, bool, set[str]]:
        root = as_path(path)
        share = open_store(root, storage_options).is_remote if share_reads is None else share_reads
        return _find(root, storage_options), share, {name for asked in everyone for name in asked}

    found, share, asked_by_any = together(ranks, ask, find_it)

    def pairs() -> list[Pair]:
        checkpoint = open_found(as_path(path), storage_options, verify, found)
        checkpoint.share_reads = share
        model: Mapping[str, StoredTensor] = checkpoint
        if strip_prefix or rename:
            model = {new: checkpoint[old] for new, old in new_names(checkpoint, strip_prefix, rename).items()}
        stored: dict[str, Mapping[str, StoredTensor]] = {"": model, "optimizer:": checkpoint.optimizer}
        missing.extend(prefix + name for prefix, names in wanted.items() for name in _missing(names, stored[prefix]))
        unexpected.extend(prefix + n for prefix in wanted for n in stored[prefix] if prefix + n not in asked_by_any)
        if strict and (missing or unexpected):
            raise StateMismatchError(_differences(checkpoint.path, missing, unexpected))
        return [
            (stored[prefix][name], tensor)
            for prefix, names in wanted.items()
            for name, tensor in names.items()
            if name in stored[prefix]
        ]

    if share:
        load_together(pairs, verify=verify, cast=cast, group=group)
    else:
        with all_or_none(group):  # each round of talk takes time: here they talk once
            load_tensors(pairs(), verify=verify, cast=cast)
    return missing, unexpected


def _find(path: str, storage_options: dict[str, Any] | None) -> Found:
    try:
        return find(path, storage_options)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


def _missing(wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Names that aren't stored, but for those of tensors that another name is: one of tied tensors is enough."""
    missing = [name for name in wanted if name not in stored]
    if not missing:
        return []
    memory = {name: identity(locate(name, tensor)) or id(tensor) for name, tensor in wanted.items()}
    filled = {key for name, key in memory.items() if name in stored}
    return [name for name in missing if memory[name] not in filled]


def load_tensors(pairs: Iterable[Pair], *, verify: bool = True, cast: bool = False) -> int:
    """Fill tensors or DTensors, each with this rank's part of a stored tensor. Not collective.

    Returns:
        The bytes that were read.

    Raises:
        StateMismatchError: Global shapes differ, or dtypes do without ``cast``; nothing has been written then.
        CorruptCheckpointError: As :func:`read`; then some of the tensors have been written.
    """
    return _fetch(_wanted(pairs, cast), verify)


def load_together(
    pairs: Callable[[], Iterable[Pair]], *, verify: bool = True, cast: bool = False, group: Any = None
) -> int:
    """The same on all ranks of a group, or on none; a collective call. Replicas may share the reading.

    Args:
        pairs: Gives the pairs. What it raises on one rank is raised on all, before anything is read.
    """
    ranks = Ranks.of(group)
    alone: list[Wanted] = []
    with all_or_none(group) as offered:
        alone += _wanted(pairs(), cast)
        sharing = Sharing(alone, ranks)
        offered.yes = sharing.offers
    assigned: list[Assigned] = []
    if offered.yes:
        alone, assigned = sharing.settle()
    with all_or_none(group):
        nbytes = _fetch([*alone, *(item.part for item in assigned if item.owner == ranks.rank)], verify)
    pass_on(assigned)
    return nbytes


def _wanted(pairs: Iterable[Pair], cast: bool) -> list[Wanted]:
    located = [(stored, locate(stored.name, tensor)) for stored, tensor in pairs]
    _check_shapes(located, cast)
    wanted: dict[Any, Wanted] = {}
    for stored, tensor in located:
        shape, local = tensor.spread.shape, tensor.local
        for place in tensor.spread.boxes if 0 not in shape else ():
            view = local
            if place.box.sizes != local.shape:
                view = narrow(local, Box(place.local_offsets, place.box.sizes))
            # tied tensors are one memory, which the first name's tensor fills, also if they were saved untied
            key = (view.data_ptr(), view.device, view.shape, view.stride(), view.dtype)
            if key not in wanted:
                wanted[key] = Wanted(stored.checkpoint, tensor.spread, Read(stored.name, stored.entry, place.box, view))
    return list(wanted.values())


def _fetch(wanted: Iterable[Wanted], verify: bool) -> int:
    of_each: dict[int, tuple[Checkpoint, list[Read]]] = {}
    for item in wanted:
        of_each.setdefault(id(item.checkpoint), (item.checkpoint, []))[1].append(item.read)
    return sum(checkpoint.fetch(reads, verify=verify) for checkpoint, reads in of_each.values())


def _check_shapes(located: Iterable[tuple[StoredTensor, Located]], cast: bool) -> None:
    faults = []
    for stored, (_, local, spread) in located:
        shape, dtype = stored.entry.shape, stored.dtype
        if spread.shape != shape:
            faults.append(f"{stored.name!r} has shape {shape} there and {spread.shape} here")
        elif local.dtype != dtype and not cast:
            faults.append(f"{stored.name!r} is {dtype} there and {local.dtype} here (cast=True converts)")
        elif local.is_meta:
            faults.append(f"{stored.name!r} is on the meta device here: materialize it before loading")
    if faults:
        raise StateMismatchError(f"The checkpoint doesn't fit the state: {_listing(faults, '; ')}.")


def _differences(path: str, missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} asked for and not in it: {_listing(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} in it and not asked for: {_listing(unexpected)}")
    return f"{path} holds other names than the state. {'; '.join(parts)}. strict=False loads what both have."


def _listing(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - SHOWN_NAMES} more" if len(items) > SHOWN_NAMES else ""
    return separator.join(items[:SHOWN_NAMES]) + more
