"""Copies from local to local files in small pieces; each is read, hashed and written while it is in the CPU cache."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.convert.outfile import Extent, Literal, Step
from lightning_shard.checkpoint.engine import Digests
from lightning_shard.checkpoint.format.blocks import check_digest
from lightning_shard.checkpoint.format.chunks import Chunk
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.loading.ranges import naming_what_fails
from lightning_shard.checkpoint.memory import byte_view, narrow
from lightning_shard.checkpoint.store import Buffer
from lightning_shard.checkpoint.store.local import pwrite
from lightning_shard.errors import CorruptCheckpointError

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
