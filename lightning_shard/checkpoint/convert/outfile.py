"""A file made of stored tensors: which of its bytes come from where, cut into steps of bounded memory.

Bytes that lie in the checkpoint as they will lie in the file are copied as bytes, whole digest blocks at a time. What
is strided there, or changes its dtype, goes through slabs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.format.chunks import Tiling
from lightning_shard.checkpoint.format.header import item_bytes
from lightning_shard.checkpoint.format.manifest import TensorEntry
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
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
    """A file to write. ``literals`` and ``tensors`` begin at the bytes given with them, and together fill ``size``."""

    name: str
    size: int
    literals: list[tuple[int, bytes]]
    tensors: list[tuple[int, Source]]


@dataclass(frozen=True)
class Literal:
    """Bytes that are known."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Extent:
    """A box of a source, whose elements follow on one another in the file, as ``dtype``.

    Where it is ``verbatim``, ``entry`` and ``box`` are of one chunk's bytes.
    """

    source: Source
    entry: TensorEntry
    box: Box
    dtype: torch.dtype
    verbatim: bool

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass
class Step:
    """Bytes of a file from ``begin`` on, to be read, checked and written by one thread."""

    begin: int
    nbytes: int = 0
    parts: list[Literal | Extent] = field(default_factory=list)

    def fill(self, buffer: Tensor) -> memoryview:
        """Read the step into the front of a buffer of bytes; returns its memory.

        Raises:
            CorruptCheckpointError: As :func:`~lightning_shard.checkpoint.read`.
        """
        memory = byte_view(buffer[: self.nbytes])
        reads: dict[int, tuple[Checkpoint, list[Read]]] = {}
        place = 0
        for part in self.parts:
            if isinstance(part, Literal):
                memory[place : place + part.nbytes] = part.data
            else:
                target = buffer[place : place + part.nbytes].view(part.dtype).view(part.box.sizes)
                checkpoint = part.source.stored.checkpoint
                own = reads.setdefault(id(checkpoint), (checkpoint, []))[1]
                own.append(Read(part.source.stored.name, part.entry, part.box, target))
            place += part.nbytes
        for checkpoint, own in reads.values():
            checkpoint.fetch(own)
        return memory


def steps(file: OutFile, step_bytes: int, slab_bytes: int) -> Iterator[Step]:
    """All bytes of a file in order, cut into steps.

    Args:
        step_bytes: The most in one step, where a digest block isn't larger.
        slab_bytes: The same of a step that puts rows together from several chunks. The chunks' blocks at its ends may
            be read a second time for the next.
    """
    tensors = [(begin, source) for begin, source in file.tensors if source.nbytes]
    items: list[tuple[int, bytes | Source]] = sorted([*file.literals, *tensors], key=lambda item: item[0])
    step = Step(0)
    for begin, item in items:
        assert begin == step.begin + step.nbytes, f"{file.name}: bytes {step.begin + step.nbytes} to {begin} are unset"
        parts = _literals(item, step_bytes) if isinstance(item, bytes) else _parts(item, step_bytes, slab_bytes)
        for part in parts:
            aligned = isinstance(part, Literal) or step.nbytes % part.dtype.itemsize == 0
            if step.nbytes and (step.nbytes + part.nbytes > step_bytes or not aligned):
                yield step
                step = Step(step.begin + step.nbytes)
            step.parts.append(part)
            step.nbytes += part.nbytes
    assert step.begin + step.nbytes == file.size
    if step.nbytes:
        yield step


def _literals(data: bytes, step_bytes: int) -> Iterator[Literal]:
    for at in range(0, len(data), step_bytes):
        yield Literal(data[at : at + step_bytes])


def _parts(source: Source, step_bytes: int, slab_bytes: int) -> Iterator[Extent]:
    entry, manifest = source.stored.entry, source.stored.checkpoint.manifest
    columns = entry.columns()
    order = columns.tiling.in_row_major_order if source.dtype == source.stored.dtype else None
    if order is None:
        width = max(source.dtype.itemsize, source.stored.dtype.itemsize)
        multiple = _whole_blocks(columns.tiling, item_bytes(entry.dtype), manifest.block_bytes)
        for box in slabs(Box.whole(entry.shape), slab_bytes // width, multiple):
            yield Extent(source, entry, box, source.dtype, verbatim=False)
        return
    step_bytes -= step_bytes % manifest.block_bytes if 0 < manifest.block_bytes <= step_bytes else 0
    for chunk in map(columns.chunk, order):
        size = chunk.end - chunk.begin
        as_bytes = TensorEntry("U8", (size,), (chunk._replace(offsets=(0,), sizes=(size,)),))
        for at in range(0, size, step_bytes):
            box = Box((at,), (min(step_bytes, size - at),))
            yield Extent(source, as_bytes, box, torch.uint8, verbatim=True)


def _whole_blocks(tiling: Tiling, width: int, block_bytes: int) -> Callable[[int], int]:
    """How many rows along a dim make up whole digest blocks in every chunk, so that no block is read twice."""

    @lru_cache
    def rows(dim: int) -> int:
        if not block_bytes:
            return 1
        row_bytes = {math.prod(sizes[dim + 1 :]) * width for sizes in tiling.sizes}
        return math.lcm(*(block_bytes // math.gcd(block_bytes, size) for size in row_bytes))

    return rows


def share_of(total: int, parts: int, index: int) -> tuple[int, int]:
    """The bytes of the ``index``-th of so many parts that are alike."""
    return total * index // parts, total * (index + 1) // parts


def share_out(all_steps: Iterable[tuple[OutFile, Step]], begin: int, end: int) -> Iterator[tuple[OutFile, Step]]:
    """The steps that end between two bytes, of all steps together."""
    done = 0
    for item in all_steps:
        done += item[1].nbytes
        if done > end:
            return
        if done > begin:
            yield item
