"""An opened checkpoint: a lazy mapping of stored tensors, the trainer state, and reading of any part into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.chunks import TensorEntry
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, Section
from lightning_shard.checkpoint.format.typed_json import decode, parse
from lightning_shard.checkpoint.loading.index import select
from lightning_shard.checkpoint.loading.ranges import Read, naming_what_fails, read_boxes
from lightning_shard.checkpoint.store import Store
from lightning_shard.checkpoint.store.remote import MAX_GAP_BYTES
from lightning_shard.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError

Item = TypeVar("Item")
TRUSTED_BYTES = 64 * 2**20
"""Before more memory than this is allocated, the files' sizes are checked, since a damaged manifest may claim any."""
MOST_SHARED = 4
"""How many times the files' bytes a read may take in memory: in torch's files, tensors may share bytes."""


class StoredTensor:
    """A lazy tensor in a checkpoint: shape and dtype are known, elements are read on demand.

    ``stored[10:20]`` reads only these rows, ``stored[..., 3]`` only this column; ``stored[[7, 900]]`` and
    ``stored[mask]`` read little more than they select. The result equals torch's for the same index.
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
        """Read the whole tensor, to the CPU."""
        return self.box(Box.whole(self.entry.shape))

    def box(self, box: Box) -> Tensor:
        """Read one box of the tensor, to the CPU."""
        (target,) = self.checkpoint.room_for([(self, box)])
        self.checkpoint.fetch([Read(self, box, target)])
        return target

    def __getitem__(self, index: Any) -> Tensor:
        checkpoint = self.checkpoint
        gap = max(MAX_GAP_BYTES, checkpoint.manifest.block_bytes if checkpoint.verify else 0)
        selection = select(index, self.entry.shape, self.name, item_bytes=self.dtype.itemsize, max_gap_bytes=gap)
        (target,) = checkpoint.room_for([(self, Box.whole(selection.sizes))])
        checkpoint.fetch([Read(self, *part) for part in zip(selection.boxes, selection.parts(target), strict=True)])
        return selection.pick(target)

    def __len__(self) -> int:
        if not self.entry.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.entry.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self  # immutable

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class StoredTensors(Mapping[str, StoredTensor]):
    """The stored tensors of one section by name."""

    def __init__(self, section: Section, checkpoint: Checkpoint) -> None:
        self._section = section
        self._tensors = {name: StoredTensor(name, entry, checkpoint) for name, entry in section.items()}

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def alias_of(self, name: str) -> str | None:
        """The name of the tensor that this one shared its memory with when it was saved, if any."""
        return self._section.alias_of(name)

    def full(self) -> dict[str, Tensor]:
        """Read all tensors into memory; tensors that shared memory when saved share it again."""
        boxes = {name: (s, Box.whole(s.entry.shape)) for name, s in self.items() if self.alias_of(name) is None}
        tensors: dict[str, Tensor] = {}
        for checkpoint, names in by_checkpoint(boxes, lambda name: boxes[name][0]):
            rooms = checkpoint.room_for([boxes[name] for name in names])
            checkpoint.fetch([Read(*boxes[name], room) for name, room in zip(names, rooms)])
            tensors.update(zip(names, rooms))
        return {name: tensors[target if (target := self.alias_of(name)) is not None else name] for name in self}


def by_checkpoint(items: Iterable[Item], stored: Callable[[Item], StoredTensor]) -> list[tuple[Checkpoint, list[Item]]]:
    """Items with the checkpoints of their stored tensors, which may be several."""
    found: dict[int, tuple[Checkpoint, list[Item]]] = {}
    for item in items:
        checkpoint = stored(item).checkpoint
        found.setdefault(id(checkpoint), (checkpoint, []))[1].append(item)
    return list(found.values())


def fetch(reads: Iterable[Read], *, verify: bool | None = None) -> int:
    """:meth:`Checkpoint.fetch` of each checkpoint that is read from."""
    own = by_checkpoint(reads, attrgetter("stored"))
    return sum([checkpoint.fetch(of_one, verify=verify) for checkpoint, of_one in own])


class Checkpoint(StoredTensors):
    """A committed checkpoint: a mapping of the model's tensors, with the other sections as attributes and methods.

    Reading is lazy, needs no process group, and verifies digests unless it was opened with ``verify=False``.

    Attributes:
        share_reads: When ranks load together, one replica reads a tensor and broadcasts it to the others; by default if
            the store is reached through a network.
    """

    def __init__(self, path: str, store: Store, manifest: Manifest, verify: bool, state: Any = None) -> None:
        super().__init__(manifest.model, self)
        self._state = state  # of another program's file, in memory already
        self.path = path
        self.manifest = manifest
        self.store = store
        self.verify = verify
        self.share_reads = store.is_remote
        self.optimizer = StoredTensors(manifest.optimizer, self)
        self.trainer = StoredTensors(manifest.trainer, self)

    def fetch(self, reads: Iterable[Read], *, verify: bool | None = None) -> int:
        """Carry out reads of this checkpoint; returns the number of bytes read.

        Raises:
            CorruptCheckpointError: As :func:`read_boxes`.
            CheckpointReplacedError: A file is missing, since the checkpoint has been replaced or removed.
        """
        with self.saying_if_replaced():
            return read_boxes(self.store, self.manifest, reads, verify=self.verify if verify is None else verify)

    def room_for(self, boxes: Sequence[tuple[StoredTensor, Box]]) -> list[Tensor]:
        """Allocate uninitialized CPU tensors for boxes of stored tensors.

        Raises:
            CorruptCheckpointError: A tensor's chunks don't cover it, or the files are too short to hold so much.
            CheckpointError: There isn't enough memory.
        """
        if not boxes:
            return []
        table = self.manifest.chunks
        entries = [stored.entry for stored, _ in boxes]
        table.check(entries)
        needed = sum(box.numel * stored.dtype.itemsize for stored, box in boxes)
        names = f"{boxes[0][0].name!r}{' and others' * (len(boxes) > 1)}"
        if needed > TRUSTED_BYTES:
            there = sum(self._size(self.manifest.files[file]) for file in table.files_of(entries))
            if needed > MOST_SHARED * there:
                raise CorruptCheckpointError(
                    f"{self.path}: the manifest gives {names} {needed:,} bytes, more than their files of {there:,}"
                    " bytes can hold: the manifest is damaged, use another checkpoint."
                )
        try:
            return [torch.empty(box.sizes, dtype=stored.dtype) for stored, box in boxes]
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(
                f"{self.path}: there is no memory for {needed:,} bytes of {names}: read parts of it, such as"
                " stored[name][:1000]."
            ) from error

    def _size(self, file: FileEntry) -> int:
        with naming_what_fails(self.store, file.path):
            size = self.store.size(file.path)
        if size < file.bytes:
            raise self._other_size(file, size)
        return size

    def _other_size(self, file: FileEntry, size: int) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.path}/{file.path} has {size:,} bytes instead of {file.bytes:,}: use another checkpoint."
        )

    def state_json(self) -> Any:
        """The trainer state as typed JSON, not decoded; None if there is none."""
        if self.manifest.state_file is None:
            return self._state
        file = self.manifest.files[self.manifest.state_file]
        with self.saying_if_replaced(), naming_what_fails(self.store, file.path):
            data = self.store.read(file.path)
        if len(data) != file.bytes:
            raise self._other_size(file, len(data))
        if self.verify and file.digest is not None and digest(data) != file.digest:
            raise CorruptCheckpointError(f"{self.path}/{file.path} differs from its digest: use another checkpoint.")
        return parse(data, f"{self.path}/{file.path}")

    def trainer_state(self, *, lenient: bool = False) -> Any:
        """The value that was saved as ``trainer_state``, or None.

        Tensors in it are read. Sharded ones (:class:`Reference`) become :class:`StoredTensor`.

        Args:
            lenient: See :func:`decode`.
        """
        tree = self.state_json()
        tensors = self.trainer.full() if tree is not None else {}

        def tensor(name: str) -> Tensor:
            if name not in tensors:
                raise CorruptCheckpointError(f"{self.path}: the trainer state refers to a tensor {name!r}: no such.")
            return tensors[name]

        return decode(tree, tensor, self.optimizer.__getitem__, lenient=lenient)

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """The tensors that ``rank`` saved as ``rank_state``; empty if it saved none."""
        section = self.manifest.ranks.get(rank)
        return StoredTensors(section, self).full() if section is not None else {}

    def saying_if_replaced(self) -> AbstractContextManager[None]:
        """:func:`saying_if_replaced` of this checkpoint."""
        # another program's file has its state inside, and no manifest
        is_foreign = self._state is not None
        return nullcontext() if is_foreign else saying_if_replaced(self.store, self.path, self.manifest.attempt)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {len(self)} model and {len(self.optimizer)} optimizer tensors)"


@contextmanager
def saying_if_replaced(store: Store, path: str, attempt: str) -> Iterator[None]:
    """Context: if a file is missing, check whether the manifest was replaced, since a later save removes old files.

    Raises:
        CheckpointReplacedError: The manifest was replaced or removed.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError) and (change := _change_since(store, attempt)):
            text = f"{path} was {change} while it was read: open it anew. ({error})"
            raise CheckpointReplacedError(text) from error
        raise


def _change_since(store: Store, attempt: str) -> str:
    """What has happened to a checkpoint since its manifest, of this attempt, was read; empty if nothing has."""
    try:
        now = Manifest.from_bytes(store.read(MANIFEST_NAME))
    except FileNotFoundError:
        return "removed"
    except Exception:
        return ""
    return f"replaced by attempt {now.attempt}" if now.attempt != attempt else ""
