"""``read`` and ``load``: what a checkpoint holds, and any part of it into any layout."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint import codec
from lightning_shard.checkpoint.commit import Ranks, all_or_none
from lightning_shard.checkpoint.dtensor import local_tensor, target_boxes
from lightning_shard.checkpoint.fetch import Read, read_boxes
from lightning_shard.checkpoint.header import DTYPES
from lightning_shard.checkpoint.manifest import MANIFEST_NAME, Manifest, Section, TensorEntry, digest
from lightning_shard.checkpoint.part import flatten
from lightning_shard.checkpoint.plan import Box
from lightning_shard.checkpoint.store import Store, as_path, open_store
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
)

SHOWN_NAMES = 10


class StoredTensor:
    """A tensor in a checkpoint: shape and dtype are known, elements are read when asked for.

    ``stored[10:20]`` reads these rows, ``stored[..., 3]`` this column; steps must be positive.
    """

    def __init__(self, name: str, entry: TensorEntry, checkpoint: Checkpoint) -> None:
        self.name = name
        self.entry = entry
        self.checkpoint = checkpoint

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    @property
    def ndim(self) -> int:
        return len(self.entry.shape)

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    def numel(self) -> int:
        return self.shape.numel()

    def full(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.box(Box.whole(self.entry.shape))

    def box(self, box: Box) -> Tensor:
        """One box of it, on the CPU."""
        target = torch.empty(box.sizes, dtype=self.dtype)
        self.checkpoint.fetch([Read(self.name, self.entry, box, target)])
        return target

    def __getitem__(self, index: Any) -> Tensor:
        offsets, sizes, after = _select(index, self.entry.shape, self.name)
        return self.box(Box(offsets, sizes))[after]

    def __len__(self) -> int:
        if not self.entry.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.entry.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self  # what is stored doesn't change

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class StoredTensors(Mapping[str, StoredTensor]):
    """The tensors of one section by name."""

    def __init__(self, section: Section, checkpoint: Checkpoint) -> None:
        self._section = section
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> StoredTensor:
        return StoredTensor(name, self._section[name], self._checkpoint)

    def __iter__(self) -> Iterator[str]:
        return iter(self._section)

    def __len__(self) -> int:
        return len(self._section)

    def __contains__(self, name: object) -> bool:
        return name in self._section.raw

    def alias_of(self, name: str) -> str | None:
        """The tensor whose memory this one shared when it was saved, if any."""
        return self._section.alias_of(name)

    def full(self) -> dict[str, Tensor]:
        """All of them in memory; those that shared memory do again."""
        tensors = {
            name: torch.empty(stored.entry.shape, dtype=stored.dtype)
            for name, stored in self.items()
            if self.alias_of(name) is None
        }
        self._checkpoint.fetch(
            Read(name, self._section[name], Box.whole(tensor.shape), tensor) for name, tensor in tensors.items()
        )
        return {name: tensors[self.alias_of(name) or name] for name in self}


class Checkpoint(StoredTensors):
    """A committed checkpoint: a mapping of the model's tensors, with everything else beside it.

    Reading is lazy, needs no process group, and verifies digests unless it was opened with ``verify=False``.
    """

    def __init__(self, path: str, store: Store, manifest: Manifest, verify: bool) -> None:
        super().__init__(manifest.model, self)
        self.path = path
        self.manifest = manifest
        self.store = store
        self.verify = verify
        self.optimizer = StoredTensors(manifest.optimizer, self)

    def fetch(self, reads: Iterable[Read], *, verify: bool | None = None) -> int:
        """Carry out reads of this checkpoint; returns the bytes read."""
        return read_boxes(self.store, self.manifest, reads, verify=self.verify if verify is None else verify)

    def state_json(self) -> Any:
        """The trainer state as encoded in its file, or None where there is none."""
        if self.manifest.state_file is None:
            return None
        file = self.manifest.files[self.manifest.state_file]
        try:
            data = self.store.read(file.path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{self.path}/{file.path} is missing: use another checkpoint.") from error
        if len(data) != file.bytes:
            raise CorruptCheckpointError(
                f"{self.path}/{file.path} has {len(data):,} bytes instead of {file.bytes:,}: use another checkpoint."
            )
        if self.verify and file.digest is not None and digest(data) != file.digest:
            raise CorruptCheckpointError(f"{self.path}/{file.path} differs from its digest: use another checkpoint.")
        return codec.parse(data, f"{self.path}/{file.path}")

    def trainer_state(self, *, lenient: bool = False) -> Any:
        """The tree that was saved as ``trainer_state``, or None.

        Tensors in it are read; sharded ones (:class:`codec.Reference`) are given as :class:`StoredTensor`.
        ``lenient``: see :func:`codec.decode`.
        """
        tree = self.state_json()
        tensors = StoredTensors(self.manifest.trainer, self).full() if tree is not None else {}

        def tensor(name: str) -> Tensor:
            if name not in tensors:
                raise CorruptCheckpointError(f"{self.path}: the trainer state refers to a tensor {name!r}: no such.")
            return tensors[name]

        return codec.decode(tree, tensor, self.optimizer.__getitem__, lenient=lenient)

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """What that rank saved as ``rank_state``; nothing for a rank that didn't save any."""
        section = self.manifest.ranks.get(rank)
        return StoredTensors(section, self).full() if section is not None else {}

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self)} model and {len(self.optimizer)} optimizer tensors)"


def exists(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> bool:
    """Whether a committed checkpoint is at the path: its manifest is."""
    return open_store(path, storage_options).exists(MANIFEST_NAME)


def read(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, verify: bool = True
) -> Checkpoint:
    """Open a checkpoint by its directory, or by the path of its manifest. Reads the manifest only.

    Raises:
        CheckpointNotFoundError: No manifest there.
        FormatVersionError: Written by a newer version of the format.
        CorruptCheckpointError: The manifest is damaged.
    """
    store = open_store(path, storage_options)
    return _open(as_path(path), store, _read_manifest(as_path(path), store), verify)


def load(
    path: str | os.PathLike[str],
    into: Mapping[str, Any] | torch.nn.Module,
    *,
    optimizer: Mapping[str, Any] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    group: Any = None,
) -> tuple[list[str], list[str]]:
    """Fill the tensors and DTensors of a state, of any layout, in place. With a process group, a collective call.

    Args:
        into: As ``state`` of :func:`save`; names that differ are told apart before anything is written.
        optimizer: The same for the optimizer's tensors; None leaves those of the checkpoint alone.
        strict: Every name asked for must be in the checkpoint, and every name in it asked for by some rank.
        cast: Convert dtypes where they differ; otherwise that is an error.
        verify: Check digests.
        group: The ranks that load together. Default: all.

    Returns:
        The names that were asked for and aren't in the checkpoint, and those in it that weren't asked for. Optimizer
        names are prefixed with ``optimizer:``.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`.
        StateMismatchError: Names (if strict), shapes or dtypes differ; nothing has been written then.
    """
    ranks = Ranks.of(group)
    with all_or_none(group):
        wanted = {"": flatten(into)} | ({"optimizer:": flatten(optimizer)} if optimizer is not None else {})
    checkpoint = _read_together(path, storage_options, verify, ranks)
    stored: dict[str, StoredTensors] = {"": checkpoint, "optimizer:": checkpoint.optimizer}
    missing = [prefix + name for prefix, names in wanted.items() for name in names if name not in stored[prefix]]
    asked = [prefix + name for prefix, names in wanted.items() for name in names]
    everyone = ranks.gather(asked)
    asked_by_any = set(ranks.broadcast(sorted({name for names in everyone for name in names})))
    unexpected = [prefix + name for prefix in wanted for name in stored[prefix] if prefix + name not in asked_by_any]
    with all_or_none(group):
        if strict and (missing or unexpected):
            raise StateMismatchError(_differences(checkpoint.path, missing, unexpected))
        pairs = [
            (stored[prefix][name], tensor)
            for prefix, names in wanted.items()
            for name, tensor in names.items()
            if name in stored[prefix]
        ]
        load_tensors(pairs, verify=verify, cast=cast)
    return missing, unexpected


def load_tensors(pairs: Iterable[tuple[StoredTensor, Tensor]], *, verify: bool = True, cast: bool = False) -> int:
    """Fill tensors or DTensors, each with this rank's part of a stored tensor. Not collective.

    Returns:
        The bytes that were read.

    Raises:
        StateMismatchError: Global shapes differ, or dtypes do without ``cast``; nothing has been written then.
        CorruptCheckpointError: As :func:`read`; then some of the tensors have been written.
    """
    pairs = list(pairs)
    _check_shapes(pairs, cast)
    per_checkpoint: dict[int, tuple[Checkpoint, list[Read]]] = {}
    done: dict[Any, None] = {}
    for stored, tensor in pairs:
        local = local_tensor(tensor)
        for place in target_boxes(stored.name, tensor)[1]:
            view = local
            for dim, (offset, size) in enumerate(zip(place.local_offsets, place.box.sizes)):
                if size != view.shape[dim]:
                    view = view.narrow(dim, offset, size)
            # tied tensors are one memory and one stored tensor: read once
            key = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype, id(stored.entry), place.box)
            if key in done:
                continue
            done[key] = None
            reads = per_checkpoint.setdefault(id(stored.checkpoint), (stored.checkpoint, []))[1]
            reads.append(Read(stored.name, stored.entry, place.box, view))
    return sum(checkpoint.fetch(reads, verify=verify) for checkpoint, reads in per_checkpoint.values())


def _check_shapes(pairs: Iterable[tuple[StoredTensor, Tensor]], cast: bool) -> None:
    faults = []
    for stored, tensor in pairs:
        if tuple(tensor.shape) != tuple(stored.shape):
            faults.append(f"{stored.name!r} has shape {tuple(stored.shape)} there and {tuple(tensor.shape)} here")
        elif tensor.dtype != stored.dtype and not cast:
            faults.append(f"{stored.name!r} is {stored.dtype} there and {tensor.dtype} here (cast=True converts)")
        elif tensor.device.type == "meta":
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


def _open(path: str, store: Store, data: bytes, verify: bool) -> Checkpoint:
    return Checkpoint(path, store, Manifest.from_bytes(data, f"{path}/{MANIFEST_NAME}"), verify)


def _read_together(
    path: str | os.PathLike[str], storage_options: dict[str, Any] | None, verify: bool, ranks: Ranks
) -> Checkpoint:
    """The checkpoint, of which the first rank reads the manifest for all: a small file, and many ranks."""
    found: bytes | Exception | None = None
    if ranks.first:
        try:
            found = _read_manifest(as_path(path), open_store(path, storage_options))
        except Exception as error:
            found = error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
    found = ranks.broadcast(found)
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, bytes)
    with all_or_none(ranks.group):
        return _open(as_path(path), open_store(path, storage_options), found, verify)


def _read_manifest(path: str, store: Store) -> bytes:
    try:
        return store.read(MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointNotFoundError(
            f"{path} holds no committed checkpoint: there is no {MANIFEST_NAME}. {_what_is_there(path, store)}"
        ) from None


def _what_is_there(path: str, store: Store) -> str:
    try:
        names = store.names()
    except Exception:
        names = []
    if not names:
        kind = "a single file" if os.path.isfile(path) else "a folder without files" if os.path.isdir(path) else ""
        if kind == "a single file":
            return "It is a single file: pass the directory that save() wrote, or load the file by its own means."
        return f"It is {kind}." if kind else "Nothing is there: check the path."
    if ".metadata" in names:
        return "It is a checkpoint of torch.distributed.checkpoint: load it with that."
    if any(name.endswith(".index.json") or name == "model.safetensors" for name in names):
        return "It is a folder of a whole model's safetensors, as transformers writes it."
    children = sorted({name.rpartition("/")[0] for name in names if name.endswith("/" + MANIFEST_NAME)})
    if children:
        return f"But there is one in {children[-1]!r} below it: did you mean that?"
    if any(name.startswith(("model/", "optimizer/", "trainer/")) for name in names):
        return "It has files of a save that was not completed: use an earlier checkpoint."
    return f"It holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''}."


def _select(index: Any, shape: tuple[int, ...], name: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """An index expression as the box to read, and the index to apply to what was read."""
    items = list(index) if isinstance(index, tuple) else [index]
    given = sum(item is not Ellipsis for item in items)
    if given > len(shape) or items.count(Ellipsis) > 1:
        raise IndexError(f"{name!r} of shape {shape} can't be indexed with {index!r}: too many indices.")
    at = items.index(Ellipsis) if Ellipsis in items else len(items)
    filler = [slice(None)] * (len(shape) - given)
    items = [*items[:at], *filler, *items[at + 1 :]]
    offsets: list[int] = []
    sizes: list[int] = []
    after: list[Any] = []
    for item, size in zip(items, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 1:
                raise IndexError(f"{name!r}: slices must have a positive step, not {step}.")
            stop = max(start, stop)
            offsets.append(start)
            sizes.append(stop - start)
            after.append(slice(None, None, step))
        else:
            place = int(item.__index__()) if hasattr(item, "__index__") else None
            if place is None or isinstance(item, bool) or not -size <= place < size:
                raise IndexError(f"{name!r} of shape {shape} can't be indexed with {item!r}.")
            offsets.append(place % size)
            sizes.append(1)
            after.append(0)
    return tuple(offsets), tuple(sizes), tuple(after)
