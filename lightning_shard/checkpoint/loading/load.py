"""``load``: fills tensors and DTensors of any layout from a checkpoint, on one process or on all ranks together."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from lightning_shard.checkpoint import half_loaded
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.engine import collection_paused
from lightning_shard.checkpoint.excluded import told_of
from lightning_shard.checkpoint.loading.open import Found, find, open_found, read_together, starting_over
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.replicas import Wanted, pass_on, settle, shareable
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor, fetch
from lightning_shard.checkpoint.memory import fill, narrow, rooms_like
from lightning_shard.checkpoint.names import Rename, as_compiled, new_names
from lightning_shard.checkpoint.optimizers.restored import Restored
from lightning_shard.checkpoint.ranks import Ranks, all_or_none, together
from lightning_shard.checkpoint.store import Buffer, as_path, open_store
from lightning_shard.checkpoint.tensors import Located, flatten, identity, locate
from lightning_shard.errors import CheckpointError, ConfigurationError, StateMismatchError

SHOWN_NAMES = 10
Pair = tuple[StoredTensor, Tensor]
"""A stored tensor, and the tensor or DTensor to fill with this rank's part of it."""
Naming = tuple[str | None, Rename | None]
"""``strip_prefix`` and ``rename``."""
CHECKED_FIRST_BYTES = 64 * 2**20
"""Up to this many bytes on a rank are read into new memory, and copied once all ranks have verified theirs."""


class LoadReport(tuple[list[str], list[str]]):
    """The result of :func:`load`. Unpacks as ``missing, unexpected = load(...)``.

    Attributes:
        nbytes: Bytes that this rank has read.
        seconds: Wall time, including waiting for other ranks.
        attempt: The attempt id of the save that wrote the checkpoint; empty for another program's files.
    """

    nbytes: int
    seconds: float
    attempt: str

    @property
    def missing(self) -> list[str]:
        """Names that were asked for and aren't in the checkpoint."""
        return self[0]

    @property
    def unexpected(self) -> list[str]:
        """Names in it that no rank asked for."""
        return self[1]


@overload
def load(
    path: str | os.PathLike[str],
    into: None = None,
    *,
    optimizer: None = None,
    strip_prefix: str | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Tensor]: ...


@overload
def load(
    path: str | os.PathLike[str],
    into: Mapping[str, Any] | torch.nn.Module,
    *,
    optimizer: Any = None,
    strict: bool = True,
    cast: bool = False,
    strip_prefix: str | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    share_reads: bool | None = None,
    group: Any = None,
) -> LoadReport: ...


@starting_over
@collection_paused()
def load(
    path: str | os.PathLike[str],
    into: Mapping[str, Any] | torch.nn.Module | None = None,
    *,
    optimizer: Any = None,
    strict: bool = True,
    cast: bool = False,
    strip_prefix: str | None = None,
    rename: Rename | None = None,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    share_reads: bool | None = None,
    group: Any = None,
) -> LoadReport | dict[str, Tensor]:
    """Fill the tensors and DTensors of a state, of any layout, in place. With a process group, a collective call.

    Args:
        path: A checkpoint, or another program's file or folder: see :func:`read`.
        into: As ``state`` of :func:`save`. Names are compared before anything is written; of a part that was compiled
            (``torch.compile``) on one side only they match. None: nothing is filled, and the model's tensors are
            returned.
        optimizer: A torch optimizer over the state's parameters, or a list of them; restores their state and their
            groups' settings, whether they have taken a step or not. Or tensors by name, as for ``into``. None leaves
            the checkpoint's optimizer unread.
        strict: Every name asked for must be in the checkpoint, and every name in it must be asked for by some rank.
        cast: Convert dtypes where they differ; otherwise a difference is an error.
        strip_prefix: Removed from the names of the checkpoint's model tensors that have it, to find them in the state.
        rename: Applied to the names after that: a mapping from prefixes to replacements, such as ``{"": "model."}``; or
            a function that returns the new name, or None to leave the tensor out.
        verify: Check digests.
        share_reads: Of ranks that need the same tensor, one reads it and broadcasts it to the others. None: do so if
            the store is reached through a network, such as an object store. Worth trying on file systems that many
            machines mount.
        group: The ranks that load together. Default: all.

    Returns:
        :class:`LoadReport`: the names that were asked for and aren't in the checkpoint, and those in it that weren't
        asked for. Optimizer names are prefixed with ``optimizer:``. Without ``into``: the model's whole tensors by
        name, on the CPU, as each rank's own.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`.
        StateMismatchError: Names (if strict), shapes or dtypes differ; nothing has been written.
        ConfigurationError: ``optimizer`` without ``into``, which names its parameters.
        CheckpointReplacedError: The checkpoint was replaced or removed while it was read, twice.
        RankFailure: A rank ended, was stopped or hangs, and the process group's timeout has expired.

    A damaged checkpoint is refused. If this rank's part is up to 64 MiB, nothing has been written then. A larger part
    is read in place, so its tensors have changed. The error says so, and :func:`save` refuses these tensors until a
    load into them succeeds, or :func:`declare_filled` declares that they were filled by other means.
    """
    naming = strip_prefix, rename
    if into is None:
        if optimizer is not None:
            raise ConfigurationError("optimizer needs into=, the module or tensors by name that it optimizes: pass it.")
        return _whole(read_together(path, storage_options=storage_options, verify=verify, group=group), naming, group)
    start = time.perf_counter()
    ranks, attempt = Ranks.of(group), ""
    wanted: dict[str, dict[str, Tensor]] = {}
    missing: list[str] = []
    unexpected: list[str] = []
    restored: list[Restored] = []

    def ask() -> set[str]:
        wanted[""] = _tensors_of(into)
        restored.extend(Restored.of(optimizer, into))
        if optimizer is not None and not restored:
            wanted["optimizer:"] = flatten(optimizer)
        named = {prefix + name for prefix, names in wanted.items() for name in names}
        return named.union(*(each.asked for each in restored))

    def find_it(everyone: list[set[str]]) -> tuple[Found, bool, set[str]]:
        root = as_path(path)
        share = open_store(root, storage_options).is_remote if share_reads is None else share_reads
        return find(root, storage_options, with_table=not ranks.alone), share, all_asked(everyone)

    found, share, asked_by_any = together(ranks, ask, find_it, all_asked)

    def pairs() -> list[Pair]:
        nonlocal attempt
        checkpoint = open_found(as_path(path), storage_options, verify, found)
        checkpoint.share_reads = share
        attempt = checkpoint.manifest.attempt
        model, names = _named(checkpoint, naming, asked_by_any)
        stored: dict[str, Mapping[str, StoredTensor]] = {"": model, "optimizer:": checkpoint.optimizer}
        missing.extend(prefix + name for prefix, names in wanted.items() for name in _missing(names, stored[prefix]))
        unexpected.extend(prefix + n for prefix in wanted for n in stored[prefix] if prefix + n not in asked_by_any)
        for each in restored:
            there = each.find(checkpoint, *names, asked_by_any)
            missing.extend(name for name in each.asked if name not in there)
            unexpected.extend(sorted(there - asked_by_any))
        if strict and (missing or unexpected):
            told = told_of(checkpoint) if missing else ""
            raise StateMismatchError(_differences(checkpoint.path, missing, unexpected) + told)
        return [
            (stored[prefix][name], tensor)
            for prefix, names in wanted.items()
            for name, tensor in names.items()
            if name in stored[prefix]
        ] + [pair for each in restored for pair in each.pairs()]

    if share:
        nbytes = load_together(pairs, verify=verify, cast=cast, group=group)
    else:
        with all_or_none(group):  # a single collective, since each round trip takes time
            arrived = _fetch([item.read for item in _wanted(pairs(), cast)], verify)
        nbytes = arrived.hand_over()
    for each in restored:
        each.finish()
    report = LoadReport((missing, unexpected))
    report.nbytes, report.seconds, report.attempt = nbytes, time.perf_counter() - start, attempt
    return report


def _whole(checkpoint: Checkpoint, naming: Naming, group: Any) -> dict[str, Tensor]:
    """The model's tensors, read on each rank of the group. A collective call."""
    with all_or_none(group):
        tensors = checkpoint.full()
        return {new: tensors[old] for new, old in new_names(tensors, *naming).items()}


def _named(checkpoint: Checkpoint, naming: Naming, asked: Collection[str]) -> tuple[Mapping[str, StoredTensor], Naming]:
    """The model's tensors by the names that are asked for, and the ``strip_prefix`` and ``rename`` that give them."""
    new = new_names(checkpoint, *naming)
    if compiled := as_compiled(new, asked):
        naming = None, {old: compiled.get(name, name) for name, old in new.items()}.get
        new = new_names(checkpoint, *naming)
    return {name: checkpoint[old] for name, old in new.items()} if any(naming) else checkpoint, naming


def all_asked(asked: Sequence[set[str]]) -> set[str]:
    return set[str]().union(*asked)


def _tensors_of(into: Mapping[str, Any] | torch.nn.Module) -> dict[str, Tensor]:
    """The tensors to fill by name."""
    if not isinstance(into, torch.nn.Module):
        return flatten(into)
    own = [*into.parameters(), *into.buffers()]
    objects = {id(tensor) for tensor in own}
    state = into.state_dict(keep_vars=True)
    if others := {name: value for name, value in state.items() if id(value) not in objects}:
        memory = {identity(locate("", tensor)) for tensor in own}
        for name, value in others.items():
            if not (isinstance(value, Tensor) and identity(locate(name, value)) in memory):
                raise StateMismatchError(
                    f"The module's state dict has {name!r}, which isn't the module's own memory, as of hooks and"
                    " get_extra_state: load into state = module.state_dict(), and then call"
                    " module.load_state_dict(state)."
                )
    return flatten(state)


def _missing(wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Wanted names that aren't stored, except tied tensors of which another name is stored."""
    missing = [name for name in wanted if name not in stored]
    if not missing:
        return []
    memory = {name: identity(locate(name, tensor)) or id(tensor) for name, tensor in wanted.items()}
    filled = {key for name, key in memory.items() if name in stored}
    return [name for name in missing if memory[name] not in filled]


def load_tensors(pairs: Iterable[Pair], *, verify: bool = True, cast: bool = False) -> int:
    """Fill tensors or DTensors, each with this rank's part of a stored tensor. Not collective.

    Returns:
        The number of bytes read.

    Raises:
        StateMismatchError: Global shapes differ, or dtypes do without ``cast``; nothing has been written.
        CorruptCheckpointError: As :func:`read`; some of the tensors may have been written, as :func:`load` says.
    """
    return _fetch([item.read for item in _wanted(pairs, cast)], verify).hand_over()


def load_together(
    pairs: Callable[[], Iterable[Pair]], *, verify: bool = True, cast: bool = False, group: Any = None
) -> int:
    """:func:`load_tensors` on all ranks of a group, or on none. A collective call; replicas may share the reading.

    Args:
        pairs: Returns the pairs. If it raises on one rank, all ranks raise, before anything is read.
    """
    ranks = Ranks.of(group)
    with all_or_none(group) as offered:
        wanted = _wanted(pairs(), cast)
        held = shareable(wanted, ranks)
        offered.yes = bool(held)
    shared, assigned = settle(held, ranks) if offered.yes else (set[int](), [])
    alone = [item.read for item in wanted if id(item.read) not in shared]
    with all_or_none(group):
        arrived = _fetch([*alone, *(item.read for item in assigned if item.owner == ranks.rank)], verify)
    passed_on = [item.read.target for item in assigned]
    with all_or_none(group):
        arrived.hand_over()
    half_loaded.mark(passed_on)  # after hand_over, which clears the marks of what this rank read
    with ranks.talking() if assigned else contextlib.nullcontext():
        pass_on(assigned)
    half_loaded.clear(passed_on)
    return arrived.nbytes


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
            # tied tensors are one memory: the last name's tensor fills it, as torch's load_state_dict would
            key = (view.data_ptr(), view.device, view.shape, view.stride(), view.dtype)
            wanted[key] = Wanted(tensor.spread, Read(stored, place.box, view))
    return list(wanted.values())


@dataclass
class _Arrived:
    """What this rank has read and verified.

    Attributes:
        targets: If read in place, marked as half loaded until the other ranks have theirs, too.
        copies: (target, new tensor, its bytes): what was read into new memory, to be copied to the target.
    """

    nbytes: int
    targets: list[Tensor]
    copies: list[tuple[Tensor, Tensor, Buffer]]

    def hand_over(self) -> int:
        """Copy to the targets, clear the marks, return ``nbytes``. Called once all ranks have verified their reads."""
        fill(self.copies)
        half_loaded.clear(self.targets)
        return self.nbytes


def _fetch(reads: Sequence[Read], verify: bool) -> _Arrived:
    targets = [read.target for read in reads]
    if sum([target.nbytes for target in targets]) <= CHECKED_FIRST_BYTES:
        rooms = rooms_like(targets)
        nbytes = fetch((Read(read.stored, read.box, *room) for read, room in zip(reads, rooms)), verify=verify)
        return _Arrived(nbytes, targets, [(target, *room) for target, room in zip(targets, rooms)])
    half_loaded.mark(targets)
    try:
        return _Arrived(fetch(reads, verify=verify), targets, [])
    except CheckpointError as error:
        raise type(error)(f"{error} {half_loaded.CHANGED}") from error


def _check_shapes(located: Iterable[tuple[StoredTensor, Located]], cast: bool) -> None:
    faults = []
    for stored, (_, local, spread) in located:
        shape, dtype = stored.entry.shape, stored.dtype
        if spread.shape != shape:
            faults.append(f"{stored.name!r} has shape {shape} in the checkpoint and {spread.shape} in the state")
        elif local.dtype != dtype and not cast:
            faults.append(
                f"{stored.name!r} is {dtype} in the checkpoint and {local.dtype} in the state (cast=True converts)"
            )
        elif local.is_meta:
            faults.append(f"{stored.name!r} is on the meta device in the state: materialize it before loading")
        elif not local.is_contiguous() and _overlaps_itself(local):
            faults.append(f"{stored.name!r} is expanded in the state, several elements of one memory: clone() it there")
    if faults:
        raise StateMismatchError(f"The checkpoint doesn't fit the state: {_listing(faults, '; ')}.")


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements share memory, as after ``expand`` or ``unfold``: no dim's step passes those of smaller steps."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _differences(path: str, missing: list[str], unexpected: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"Missing in the checkpoint ({len(missing)}): {_listing(missing)}")
    if unexpected:
        parts.append(f"Not in the state ({len(unexpected)}): {_listing(unexpected)}")
    return f"The names in {path} and in the state differ. {'. '.join(parts)}. strict=False loads the names in both."


def _listing(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - SHOWN_NAMES} more" if len(items) > SHOWN_NAMES else ""
    return separator.join(items[:SHOWN_NAMES]) + more
