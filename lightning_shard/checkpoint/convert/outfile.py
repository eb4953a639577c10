"""Plans a file that is made of stored tensors: the source of each byte range, cut into steps of bounded memory.

Bytes that are contiguous in the checkpoint in the file's order are copied verbatim, in whole digest blocks. Tensors
that are strided in the checkpoint, or change their dtype, are read in slabs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.format.chunks import Chunk, TensorEntry
from lightning_shard.checkpoint.format.header import item_bytes
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.stored import StoredTensor, fetch
from lightning_shard.checkpoint.memory import byte_view


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
    """A file to write. ``literals`` and ``tensors`` have their positions, and together fill ``size`` bytes."""

    name: str
    size: int
    literals: list[tuple[int, bytes]]
    tensors: list[tuple[int, Source]]


@dataclass(frozen=True)
class Extent:
    """A box of a stored tensor, written to the file contiguously in row-major order, as ``dtype``."""

    stored: StoredTensor
    box: Box
    dtype: torch.dtype


def _nbytes(part: bytes | Extent) -> int:
    return len(part) if isinstance(part, bytes) else part.box.numel * part.dtype.itemsize


@dataclass
class Step:
    """A byte range of a file, from ``begin`` on, that one thread reads, verifies and writes."""

    begin: int
    nbytes: int = 0
    parts: list[bytes | Extent] = field(default_factory=list)

    def fill(self, buffer: Tensor) -> memoryview:
        """Read the step into the front of a uint8 buffer; returns that part as bytes."""
        memory = byte_view(buffer[: self.nbytes])
        reads: list[Read] = []
        place = 0
        for part in self.parts:
            end = place + _nbytes(part)
            if isinstance(part, bytes):
                memory[place:end] = part
            else:
                reads.append(Read(part.stored, part.box, buffer[place:end].view(part.dtype).view(part.box.sizes)))
            place = end
        fetch(reads)
        return memory


def steps(file: OutFile, step_bytes: int, slab_bytes: int) -> Iterator[Step]:
    """Cut a file into steps, in order.

    Args:
        step_bytes: Largest size of a step, unless a digest block is larger.
        slab_bytes: The same for steps that assemble rows from several chunks; digest blocks at the edges of such a step
            may be read again for the next one.
    """
    tensors = [(begin, source) for begin, source in file.tensors if source.nbytes]
    items: list[tuple[int, bytes | Source]] = sorted([*file.literals, *tensors], key=lambda item: item[0])
    step = Step(0)
    for begin, item in items:
        assert begin == step.begin + step.nbytes, f"{file.name}: bytes {step.begin + step.nbytes} to {begin} are unset"
        parts: Iterable[bytes | Extent]
        if isinstance(item, bytes):
            parts = (item[at : at + step_bytes] for at in range(0, len(item), step_bytes))
        else:
            parts = _parts(item, step_bytes, slab_bytes)
        for part in parts:
            aligned = isinstance(part, bytes) or step.nbytes % part.dtype.itemsize == 0
            if step.nbytes and (step.nbytes + _nbytes(part) > step_bytes or not aligned):
                yield step
                step = Step(step.begin + step.nbytes)
            step.parts.append(part)
            step.nbytes += _nbytes(part)
    assert step.begin + step.nbytes == file.size
    if step.nbytes:
        yield step


def _parts(source: Source, step_bytes: int, slab_bytes: int) -> Iterator[Extent]:
    entry, manifest = source.stored.entry, source.stored.checkpoint.manifest
    chunks = entry.chunks
    order = _in_row_major_order(entry.shape, chunks) if source.dtype == source.stored.dtype else None
    if order is None:
        width = max(source.dtype.itemsize, source.stored.dtype.itemsize)
        multiple = _whole_blocks({chunk.sizes for chunk in chunks}, item_bytes(entry.dtype), manifest.block_bytes)
        for box in slabs(Box.whole(entry.shape), slab_bytes // width, multiple):
            yield Extent(source.stored, box, source.dtype)
        return
    step_bytes -= step_bytes % manifest.block_bytes if 0 < manifest.block_bytes <= step_bytes else 0
    for chunk in order:
        size = chunk.end - chunk.begin
        entry = TensorEntry("U8", (size,), given=(chunk._replace(offsets=(0,), sizes=(size,)),))
        as_bytes = StoredTensor(source.stored.name, entry, source.stored.checkpoint)
        for at in range(0, size, step_bytes):
            box = Box((at,), (min(step_bytes, size - at),))
            yield Extent(as_bytes, box, torch.uint8)


def _in_row_major_order(shape: Sequence[int], chunks: Sequence[Chunk]) -> list[Chunk] | None:
    """The chunks in the order in which they are the row-major tensor, one after another; None if there is no such."""
    ordered = sorted((chunk for chunk in chunks if chunk.end > chunk.begin), key=lambda chunk: chunk.offsets)
    position = 0
    for chunk in ordered:
        box = Box(chunk.offsets, chunk.sizes)
        dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(box.sizes))
        if box.first(shape) != position or box.sizes[dim + 1 :] != shape[dim + 1 :]:
            return None
        position += box.numel
    return ordered


def _whole_blocks(all_sizes: Collection[tuple[int, ...]], width: int, block_bytes: int) -> Callable[[int], int]:
    """A function of a dim: how many rows along it are whole digest blocks in every chunk, so no block is read twice."""

    @lru_cache
    def rows(dim: int) -> int:
        if not block_bytes:
            return 1
        row_bytes = {math.prod(sizes[dim + 1 :]) * width for sizes in all_sizes if 0 not in sizes}
        return math.lcm(*(block_bytes // math.gcd(block_bytes, size) for size in row_bytes))

    return rows
