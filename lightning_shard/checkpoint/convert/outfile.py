"""Plans a file that is made of stored tensors: the source of each byte range, cut into steps of bounded memory.

Bytes that are contiguous in the checkpoint in the file's order are copied verbatim, in whole digest blocks. Tensors
that are strided in the checkpoint, or change their dtype, are read in slabs of rows.

Copies from local to local files in small pieces; each is read, hashed and written while it is in the CPU cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.engine import Digests
from lightning_shard.checkpoint.format.blocks import check_digest
from lightning_shard.checkpoint.format.chunks import Chunk, TensorEntry
from lightning_shard.checkpoint.format.header import DTYPES, item_bytes
from lightning_shard.checkpoint.loading.ranges import Read, naming_what_fails
from lightning_shard.checkpoint.loading.stored import StoredTensor, fetch
from lightning_shard.checkpoint.memory import byte_view, narrow
from lightning_shard.checkpoint.store import Buffer
from lightning_shard.checkpoint.store.local import pwrite
from lightning_shard.errors import CorruptCheckpointError


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
class Literal:
    """Known bytes, such as a header."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Extent:
    """A box of a stored tensor, written to the file contiguously in row-major order, as ``dtype``.

    If ``verbatim``, ``stored`` is one chunk's bytes as a uint8 tensor, and ``box`` is a range of them.
    """

    stored: StoredTensor
    box: Box
    dtype: torch.dtype
    verbatim: bool

    @property
    def nbytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


@dataclass
class Step:
    """A byte range of a file, from ``begin`` on, that one thread reads, verifies and writes."""

    begin: int
    nbytes: int = 0
    parts: list[Literal | Extent] = field(default_factory=list)

    def fill(self, buffer: Tensor) -> memoryview:
        """Read the step into the front of a uint8 buffer; returns that part as bytes.

        Raises:
            CorruptCheckpointError: As :func:`~lightning_shard.checkpoint.read`.
        """
        memory = byte_view(buffer[: self.nbytes])
        reads: list[Read] = []
        place = 0
        for part in self.parts:
            if isinstance(part, Literal):
                memory[place : place + part.nbytes] = part.data
            else:
                target = buffer[place : place + part.nbytes].view(part.dtype).view(part.box.sizes)
                reads.append(Read(part.stored, part.box, target))
            place += part.nbytes
        fetch(reads)
        return memory


def steps(file: OutFile, step_bytes: int, slab_bytes: int) -> Iterator[Step]:
    """Cut a file into steps, in order.

    Args:
        file: The file.
        step_bytes: Largest size of a step, unless a digest block is larger.
        slab_bytes: The same for steps that assemble rows from several chunks. Digest blocks at the edges of such a step
            may be read again for the next one.
    """
    tensors = [(begin, source) for begin, source in file.tensors if source.nbytes]
    items: list[tuple[int, bytes | Source]] = sorted([*file.literals, *tensors], key=lambda item: item[0])
    step = Step(0)
    for begin, item in items:
        assert begin == step.begin + step.nbytes, f"{file.name}: bytes {step.begin + step.nbytes} to {begin} are unset"
        parts: Iterable[Literal | Extent]
        if isinstance(item, bytes):
            parts = (Literal(item[at : at + step_bytes]) for at in range(0, len(item), step_bytes))
        else:
            parts = _parts(item, step_bytes, slab_bytes)
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


def _parts(source: Source, step_bytes: int, slab_bytes: int) -> Iterator[Extent]:
    entry, manifest = source.stored.entry, source.stored.checkpoint.manifest
    chunks = entry.chunks
    order = _in_row_major_order(entry.shape, chunks) if source.dtype == source.stored.dtype else None
    if order is None:
        width = max(source.dtype.itemsize, source.stored.dtype.itemsize)
        multiple = _whole_blocks({chunk.sizes for chunk in chunks}, item_bytes(entry.dtype), manifest.block_bytes)
        for box in slabs(Box.whole(entry.shape), slab_bytes // width, multiple):
            yield Extent(source.stored, box, source.dtype, verbatim=False)
        return
    step_bytes -= step_bytes % manifest.block_bytes if 0 < manifest.block_bytes <= step_bytes else 0
    for chunk in order:
        size = chunk.end - chunk.begin
        entry = TensorEntry("U8", (size,), given=(chunk._replace(offsets=(0,), sizes=(size,)),))
        as_bytes = StoredTensor(source.stored.name, entry, source.stored.checkpoint)
        for at in range(0, size, step_bytes):
            box = Box((at,), (min(step_bytes, size - at),))
            yield Extent(as_bytes, box, torch.uint8, verbatim=True)


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


def share_out(all_steps: Iterable[tuple[OutFile, Step]], begin: int, end: int) -> Iterator[tuple[OutFile, Step]]:
    """The steps that end in (``begin``, ``end``], counted in bytes over all steps."""
    done = 0
    for item in all_steps:
        done += item[1].nbytes
        if done > end:
            return
        if done > begin:
            yield item


PIECE_BYTES = 2**18
CONVERTED_ELEMENTS = 2**15 - 1
"""With more elements, torch converts with several threads."""
BAND_BYTES = 2**20
"""How much is assembled at a time of a tensor whose rows are in several chunks, or change their dtype."""
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copier:
    """Copies steps of files; used by one thread."""

    def __init__(self) -> None:
        self._piece = torch.empty(max(PIECE_BYTES, BAND_BYTES), dtype=torch.uint8)
        self._band = torch.empty(BAND_BYTES, dtype=torch.uint8)
        self._spare = torch.empty(BAND_BYTES, dtype=torch.uint8)

    def copy(self, step: Step, out: int) -> None:
        """Write a step's bytes to their position in the open file ``out``.

        Raises:
            CorruptCheckpointError: As :func:`~lightning_shard.checkpoint.read`; some bytes may have been written.
        """
        at = step.begin
        for part in step.parts:
            if isinstance(part, Literal):
                pwrite(out, memoryview(part.data), at)
            elif part.verbatim:
                self._copy_bytes(part, out, at)
            else:
                self._put_together(part, out, at)
            at += part.nbytes

    def _copy_bytes(self, part: Extent, out: int, at: int) -> None:
        (chunk,), (begin,), (size,) = part.stored.entry.chunks, part.box.offsets, part.box.sizes
        memory = byte_view(self._piece)
        with contextlib.ExitStack() as files:
            stream = _Stream(part, chunk, begin, begin + size, memory, files)
            end = at + size
            while at < end:
                piece = memory[: min(PIECE_BYTES - at % PIECE_BYTES, end - at)]  # whole pages: a sixth faster
                stream.take(piece)
                pwrite(out, piece, at)
                at += piece.nbytes
            stream.finish()

    def _put_together(self, part: Extent, out: int, at: int) -> None:
        dtype = DTYPES[part.stored.entry.dtype]
        streams: list[tuple[Box, _Stream]] = []
        with contextlib.ExitStack() as files:
            for chunk, held in part.stored.entry.overlapping(part.box):
                whole = Box(chunk.offsets, chunk.sizes)
                # the part is contiguous in the tensor, so its elements in a chunk are contiguous in the chunk, too
                begin = held.within(whole).first(chunk.sizes) * dtype.itemsize
                end = begin + held.numel * dtype.itemsize
                streams.append((whole, _Stream(part, chunk, begin, end, byte_view(self._piece), files)))
            for band in slabs(part.box, BAND_BYTES // max(dtype.itemsize, part.dtype.itemsize)):
                target = self._band[: band.numel * part.dtype.itemsize].view(part.dtype).view(band.sizes)
                for whole, stream in streams:
                    found = whole.intersect(band)
                    if found is not None:
                        piece = self._piece[: found.numel * dtype.itemsize]
                        stream.take(byte_view(piece))
                        self._put(piece.view(dtype), narrow(target, found.within(band)))
                data = byte_view(target)
                pwrite(out, data, at)
                at += data.nbytes
            for _, stream in streams:
                stream.finish()

    def _put(self, source: Tensor, target: Tensor) -> None:
        """Copy elements to a tensor with as many elements, of any strides and dtype.

        Single-threaded: torch converts parts too small for its own threads; numpy, which has no threads, copies.
        """
        if source.dtype != target.dtype:
            whole = target.is_contiguous()
            to = target if whole else self._spare[: source.numel() * target.dtype.itemsize].view(target.dtype)
            to = to.view(-1)
            for at in range(0, source.numel(), CONVERTED_ELEMENTS):
                to[at : at + CONVERTED_ELEMENTS].copy_(source[at : at + CONVERTED_ELEMENTS])
            if whole:
                return
            source = to
        raw = _RAW.get(source.dtype.itemsize, source.dtype)
        np.copyto(target.view(raw).numpy(), source.view(raw).view(target.shape).numpy())


class _Stream:
    """Sequential reader of a chunk's bytes ``begin`` to ``end``, extended to whole digest blocks to verify them."""

    def __init__(
        self, part: Extent, chunk: Chunk, begin: int, end: int, scratch: Buffer, files: contextlib.ExitStack
    ) -> None:
        checkpoint = part.stored.checkpoint
        self._store, self._path = checkpoint.store, checkpoint.manifest.files[chunk.file].path
        self._name, self._chunk, self._scratch = part.stored.name, chunk, scratch
        self._block_bytes = checkpoint.manifest.block_bytes if checkpoint.verify and chunk.digests else 0
        self._at = begin - begin % self._block_bytes if self._block_bytes else begin
        self._end = min(end + -end % self._block_bytes, chunk.end - chunk.begin) if self._block_bytes else end
        self._digests = Digests(self._block_bytes, self._check_block)
        with naming_what_fails(self._store, self._path, self._name):
            self._read = files.enter_context(self._store.reading(self._path))
        self._skip(begin)

    def take(self, buffer: Buffer) -> None:
        """Fill a buffer with the next bytes."""
        try:
            self._read([(self._chunk.begin + self._at, buffer)])
        except CorruptCheckpointError:
            with naming_what_fails(self._store, self._path, self._name):
                raise
        if not self._block_bytes:
            self._at += buffer.nbytes
            return
        while buffer.nbytes:  # a block at a time, since its end is at ``_at`` when it is checked
            part = buffer[: self._block_bytes - self._at % self._block_bytes]
            self._at += part.nbytes
            self._digests.update(part)
            buffer = buffer[part.nbytes :]
        if self._at == self._chunk.end - self._chunk.begin:
            self._digests.end()

    def finish(self) -> None:
        """Read the last block to its end, to verify it."""
        self._skip(self._end)

    def _skip(self, to: int) -> None:
        while self._at < to:
            self.take(self._scratch[: min(to - self._at, PIECE_BYTES)])

    def _check_block(self, found: bytes) -> None:
        block = (self._at - 1) // self._block_bytes
        begin, end = self._chunk.begin + block * self._block_bytes, self._chunk.begin + self._at
        expected = self._chunk.block_digest(block)
        check_digest(found, expected, self._name, begin, end, f"{self._store.root}/{self._path}")
