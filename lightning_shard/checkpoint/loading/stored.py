"""``read`` and ``load``: what a checkpoint holds, and any part of it into any layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format import codec
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest, Section, TensorEntry
from lightning_shard.checkpoint.loading.ranges import Read, read_boxes
from lightning_shard.checkpoint.store import Store
from lightning_shard.errors import CheckpointError, CorruptCheckpointError

TRUSTED_BYTES = 64 * 2**20
"""Memory for more than this is asked for only after a look at the files' sizes."""
MOST_SHARED = 4
"""How often the same bytes of a file may be read into memory: in torch's files, tensors may share them."""


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
        (target,) = self.checkpoint.room_for([(self.name, self.entry, box)])
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
        wholes = [
            (name, self._section[name], Box.whole(self._section[name].shape))
            for name in self
            if self.alias_of(name) is None
        ]
        targets = self._checkpoint.room_for(wholes)
        self._checkpoint.fetch(Read(*whole, target) for whole, target in zip(wholes, targets))
        tensors = {name: target for (name, _, _), target in zip(wholes, targets)}
        return {name: tensors[target if (target := self.alias_of(name)) is not None else name] for name in self}


class Checkpoint(StoredTensors):
    """A committed checkpoint: a mapping of the model's tensors, with everything else beside it.

    Reading is lazy, needs no process group, and verifies digests unless it was opened with ``verify=False``.

    Attributes:
        share_reads: Where ranks load together, what several need alike is read by one, which passes it on; by default
            if the store is reached through a network.
    """

    def __init__(self, path: str, store: Store, manifest: Manifest, verify: bool, state: Any = None) -> None:
        super().__init__(manifest.model, self)
        self._state = state  # of a file of another program, which has it in memory
        self.path = path
        self.manifest = manifest
        self.store = store
        self.verify = verify
        self.share_reads = store.is_remote
        self.optimizer = StoredTensors(manifest.optimizer, self)

    def fetch(self, reads: Iterable[Read], *, verify: bool | None = None) -> int:
        """Carry out reads of this checkpoint; returns the bytes read."""
        return read_boxes(self.store, self.manifest, reads, verify=self.verify if verify is None else verify)

    def room_for(self, boxes: Sequence[tuple[str, TensorEntry, Box]]) -> list[Tensor]:
        """Memory for boxes of stored tensors, uninitialized.

        Raises:
            CorruptCheckpointError: Their chunks don't make them up, or the files are too short to hold so much.
            CheckpointError: There isn't so much memory.
        """
        files: set[int] = set()
        for _, entry, _ in boxes:
            entry.check_coverage()
        needed = sum(box.numel * DTYPES[entry.dtype].itemsize for _, entry, box in boxes)
        if needed > TRUSTED_BYTES:
            files.update(chunk.file for _, entry, _ in boxes for chunk in entry.chunks)
            stored = sum(self._size(self.manifest.files[file]) for file in sorted(files))
            if needed > MOST_SHARED * stored:
                raise CorruptCheckpointError(
                    f"{self.path}: {boxes[0][0]!r}{' and others are' if len(boxes) > 1 else ' is'} said to have"
                    f" {needed:,} bytes, in files of {stored:,}: the manifest is damaged, use another checkpoint."
                )
        try:
            return [torch.empty(box.sizes, dtype=DTYPES[entry.dtype]) for _, entry, box in boxes]
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"{self.path}: there is no memory for {needed:,} bytes of {boxes[0][0]!r}"
                f"{' and others' if len(boxes) > 1 else ''}: read parts of it, such as stored[name][:1000]."
            ) from error

    def _size(self, file: FileEntry) -> int:
        with self._naming(file):
            size = self.store.size(file.path)
        if size < file.bytes:
            raise CorruptCheckpointError(
                f"{self.path}/{file.path} has {size:,} bytes instead of {file.bytes:,}: use another checkpoint."
            )
        return size

    @contextlib.contextmanager
    def _naming(self, file: FileEntry) -> Iterator[None]:
        """Errors of the system as ours, with the file's name."""
        where = f"{self.path}/{file.path}"
        try:
            yield
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{where} is missing: use another checkpoint.") from error
        except OSError as error:
            raise CheckpointError(f"{where} can't be read: {type(error).__name__}: {error}") from error

    def state_json(self) -> Any:
        """The trainer state as encoded in its file, or None where there is none."""
        if self.manifest.state_file is None:
            return self._state
        file = self.manifest.files[self.manifest.state_file]
        with self._naming(file):
            data = self.store.read(file.path)
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
