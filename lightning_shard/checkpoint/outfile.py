"""A file made of stored tensors: which of its bytes come from where, cut into steps of bounded memory.

Bytes that lie in the checkpoint as they will lie in the file are copied as bytes, whole digest blocks at a time. What is
strided there, or changes its dtype, goes through slabs of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_shard.checkpoint.fetch import Read
from lightning_shard.checkpoint.manifest import Chunk, TensorEntry
from lightning_shard.checkpoint.plan import Box
from lightning_shard.checkpoint.reader import StoredTensor
from lightning_shard.checkpoint.transfer import byte_view

STEP_BYTES = 4 * 2**20
"""What is read, then written, at a time: small enough to be in a core's cache still when it is written."""
SLAB_BYTES = 16 * 2**20
"""The same where rows have to be put together, which may read a block too many at each end."""


@dataclass(frozen=True)
class Source:
    """A stored tensor and the dtype that it is written in."""

    stored: StoredTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.stored.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """A file to write. ``literals`` and ``tensors`` begin at the bytes given with them, and together fill ``size``."""

    name: str
    size: int
    literals: list[tuple[int, bytes]]
    tensors: list[tuple[int, Source]]


@dataclass(frozen=True)
class _Part:
    """Bytes that follow on one another in the file: a literal, or a box of ``entry``, read as ``dtype``."""

    nbytes: int
    literal: bytes = b""
    source: Source | None = None
    entry: TensorEntry | None = None
    box: Box | None = None
    dtype: torch.dtype = torch.uint8


@dataclass
class Step:
    """The bytes of a file from ``begin`` on that are read into one buffer."""

    begin: int
    nbytes: int = 0
    parts: list[_Part] = field(default_factory=list)

    def fill(self, buffer: Tensor) -> memoryview:
        """Read the step into the front of a buffer of bytes; returns its memory.

        Raises:
            CorruptCheckpointError: As :func:`~lightning_shard.checkpoint.read`.
        """
        memory = byte_view(buffer[: self.nbytes])
        reads: list[Read] = []
        place = 0
        for part in self.parts:
            if part.source is None:
                memory[place : place + part.nbytes] = part.literal
            else:
                assert part.entry is not None
                assert part.box is not None
                target = buffer[place : place + part.nbytes].view(part.dtype).view(part.box.sizes)
                reads.append(Read(part.source.stored.name, part.entry, part.box, target))
                checkpoint = part.source.stored.checkpoint
            place += part.nbytes
        if reads:
            checkpoint.fetch(reads)
        return memory


def steps(file: OutFile, step_bytes: int = STEP_BYTES) -> Iterator[Step]:
    """All bytes of a file in order, cut into steps of at most ``step_bytes``, or a slab or a digest block if larger."""
    items = sorted([*file.literals, *file.tensors], key=lambda item: item[0])
    step = Step(0)
    for begin, item in items:
        assert begin == step.begin + step.nbytes, f"{file.name}: bytes {step.begin + step.nbytes} to {begin} are unset"
        for part in _literal(item, step_bytes) if isinstance(item, bytes) else _parts(item, step_bytes):
            if step.nbytes and (step.nbytes + part.nbytes > step_bytes or step.nbytes % part.dtype.itemsize):
                yield step
                step = Step(step.begin + step.nbytes)
            step.parts.append(part)
            step.nbytes += part.nbytes
    assert step.begin + step.nbytes == file.size
    if step.nbytes:
        yield step


def _literal(data: bytes, step_bytes: int) -> Iterator[_Part]:
    for at in range(0, len(data), step_bytes):
        part = data[at : at + step_bytes]
        yield _Part(len(part), part)


def _parts(source: Source, step_bytes: int) -> Iterator[_Part]:
    entry, block_bytes = source.stored.entry, source.stored.checkpoint.manifest.block_bytes
    chunks = _in_file_order(entry) if source.dtype == source.stored.dtype else None
    if chunks is None:
        for box in _slabs(Box.whole(entry.shape), source, block_bytes):
            yield _Part(box.numel * source.dtype.itemsize, b"", source, entry, box, source.dtype)
        return
    step_bytes -= step_bytes % block_bytes if 0 < block_bytes <= step_bytes else 0
    for chunk in chunks:
        size = chunk.end - chunk.begin
        as_bytes = TensorEntry(
            "U8", (size,), (Chunk(chunk.file, chunk.begin, chunk.end, (0,), (size,), chunk.digests),)
        )
        for at in range(0, size, step_bytes):
            box = Box((at,), (min(step_bytes, size - at),))
            yield _Part(box.numel, b"", source, as_bytes, box)


def _in_file_order(entry: TensorEntry) -> list[Chunk] | None:
    """The chunks whose bytes, one after another, are the tensor's; None where there is no such order."""
    chunks = sorted((chunk for chunk in entry.chunks if chunk.end > chunk.begin), key=lambda chunk: chunk.offsets)
    strides = [math.prod(entry.shape[dim + 1 :]) for dim in range(len(entry.shape))]
    position = 0
    for chunk in chunks:
        dim = next((dim for dim, size in enumerate(chunk.sizes) if size > 1), len(chunk.sizes))
        first = sum(offset * stride for offset, stride in zip(chunk.offsets, strides))
        if first != position or chunk.sizes[dim + 1 :] != entry.shape[dim + 1 :]:
            return None
        position += math.prod(chunk.sizes)
    return chunks if position == math.prod(entry.shape) else None


def _slabs(box: Box, source: Source, block_bytes: int) -> Iterator[Box]:
    """Boxes that follow on one another in row-major order, none larger than a slab; none for no elements."""
    width = max(source.dtype.itemsize, source.stored.dtype.itemsize)
    if box.numel == 0:
        return
    if box.numel * width <= SLAB_BYTES:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
    rows = max(1, SLAB_BYTES // (box.numel // box.sizes[dim] * width))
    whole_blocks = _rows_of_whole_blocks(source.stored.entry, dim, source.stored.dtype.itemsize, block_bytes)
    rows -= rows % whole_blocks if rows >= whole_blocks else 0
    for first in range(0, box.sizes[dim], rows):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[dim] += first
        sizes[dim] = min(rows, sizes[dim] - first)
        yield from _slabs(Box(tuple(offsets), tuple(sizes)), source, block_bytes)


def _rows_of_whole_blocks(entry: TensorEntry, dim: int, width: int, block_bytes: int) -> int:
    """How many rows along a dim make up whole digest blocks in every chunk, so that no block is read twice."""
    if not block_bytes:
        return 1
    row_bytes = {math.prod(chunk.sizes[dim + 1 :]) * width for chunk in entry.chunks if chunk.end > chunk.begin}
    return math.lcm(*(block_bytes // math.gcd(block_bytes, size) for size in row_bytes))


def share_out(all_steps: list[tuple[OutFile, Step]], parts: int, index: int) -> list[tuple[OutFile, Step]]:
    """The ``index``-th of ``parts`` lists of consecutive steps, alike in bytes."""
    ends = list(itertools.accumulate(step.nbytes for _, step in all_steps))
    total = ends[-1] if ends else 0
    low, high = total * index // parts, total * (index + 1) // parts
    return [item for item, end in zip(all_steps, ends) if low < end <= high]
