"""The table of chunks: a safetensors file of columns of numbers, one row per chunk, beside the manifest.

The manifest has the file's length and a digest of each block of it, so a reader verifies the part that it reads. The
file's bytes are held in one buffer; of a large file only the blocks that are needed are read. Specified in
docs/format.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import DIGEST_BYTES, digest
from lightning_shard.checkpoint.format.header import HeaderEntry, layout_fault, parse_header
from lightning_shard.errors import CheckpointError, CorruptCheckpointError

BLOCK_BYTES = 4 * 2**20
"""Each block of the file has a digest in the manifest; fixed by the format. The file's header is in the first."""
WHOLE_BYTES = 64 * 2**20
"""A larger table is read by blocks, by each rank for itself."""
Integers = NDArray[np.int64]
Spans = Sequence[tuple[int, int]]
_NUMBERS = ("file", "begin", "block", "offsets", "sizes")


@dataclass(frozen=True)
class TableFile:
    """The manifest's entry of the table: its path, its size, and the digests of its blocks, in one string."""

    path: str
    bytes: int
    digests: str

    @property
    def blocks(self) -> int:
        return -(-self.bytes // BLOCK_BYTES)


class Rows(NamedTuple):
    """The columns of ``n`` chunks; boxes are padded to ``dims`` dims by offset 0 and size 1."""

    file: Integers
    """The index of the file, of shape ``(n,)``."""
    begin: Integers
    """The first byte in the file, ``(n,)``."""
    block: Integers
    """The index in ``digests`` of the chunk's first block, ``(n,)``."""
    offsets: Integers
    """In elements, ``(n, dims)``."""
    sizes: Integers
    """In elements, ``(n, dims)``."""
    digests: NDArray[np.uint8]
    """The digests of all chunks' blocks, ``(blocks, 16)``."""

    def boxes(self, first: int, last: int, ndim: int) -> list[Box]:
        """The boxes of the rows from ``first`` up to ``last`` (exclusive), of a tensor of ``ndim`` dims."""
        boxes = zip(self.offsets[first:last, :ndim].tolist(), self.sizes[first:last, :ndim].tolist())
        return [Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes]

    def encode(self) -> bytes:
        """The table's file."""
        columns = {name: np.ascontiguousarray(column) for name, column in zip(self._fields, self)}
        return safetensors.save(columns)


def columns_of(numbers: Sequence[tuple[int, ...]], dims: int, fill: int) -> Integers:
    """Offsets or sizes as an array of shape ``(n, dims)``, padded by ``fill``."""
    return np.array([(*each, *(fill,) * (dims - len(each))) for each in numbers], np.int64).reshape(len(numbers), dims)


def padded(numbers: Integers, dims: int, fill: int) -> Integers:
    """Offsets or sizes with more dims."""
    return np.pad(numbers, ((0, 0), (0, dims - numbers.shape[1])), constant_values=fill)


def table_file(path: str, data: bytes) -> TableFile:
    view = memoryview(data)
    digests = (digest(view[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES))
    return TableFile(path, len(data), "".join(digests))


class Table:
    """A table's columns, verified by the manifest's digests as they are read.

    Args:
        file: The manifest's entry.
        source: The path, for errors.
        read: Fills a buffer with the file's bytes from a position on, as often as it is needed; raises
            CorruptCheckpointError if the file is shorter than ``file.bytes``.
        data: The file's bytes, verified already, in place of ``read``.
    """

    def __init__(
        self,
        file: TableFile,
        source: str,
        read: Callable[[int, memoryview], None] | None = None,
        data: bytes | None = None,
    ) -> None:
        self.file = file
        self._source = source
        self._read = read
        self.has_file = read is not None
        self._there = np.full(file.blocks, data is not None)
        if data is not None:
            self._memory = np.frombuffer(data, np.uint8)
        self._starts: dict[str, int] = {}
        """The position of each column in the file."""

    @cached_property
    def _memory(self) -> NDArray[np.uint8]:
        assert self._read is not None
        if self.file.bytes > WHOLE_BYTES:
            self._read(self.file.bytes - 1, memoryview(bytearray(1)))  # the file has so many bytes
        try:
            return np.empty(self.file.bytes, np.uint8)
        except MemoryError as error:
            raise CheckpointError(f"There is no memory for the {self.file.bytes:,} bytes of {self._source}.") from error

    def corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._source}: {what}: use another checkpoint.")

    @cached_property
    def rows(self) -> Rows:
        """The columns. Of a large table, only the rows that were brought have their values."""
        self._bring([(0, min(BLOCK_BYTES, self.file.bytes))])
        first = bytes(self._memory[:BLOCK_BYTES])
        entries, _ = parse_header(first, self._source)
        header_bytes = 8 + int.from_bytes(first[:8], "little")
        fault = layout_fault(entries.values(), header_bytes, self.file.bytes)
        if fault is not None:
            raise self.corrupt(f"{fault[0] or 'the file'}: {fault[1]}")
        numbers = [self._column(entries, name, "I64", 2 if name in ("offsets", "sizes") else 1) for name in _NUMBERS]
        digests = self._column(entries, "digests", "U8", 2)
        if len({len(column) for column in numbers}) != 1 or numbers[3].shape != numbers[4].shape:
            raise self.corrupt("its columns have different lengths")
        if digests.shape[1] != DIGEST_BYTES:
            raise self.corrupt(f"its digests have {digests.shape[1]} bytes instead of {DIGEST_BYTES}")
        file, begin, block, offsets, sizes = numbers
        return Rows(file, begin, block, offsets, sizes, digests)

    def _column(self, entries: dict[str, HeaderEntry], name: str, dtype: str, ndim: int) -> NDArray[Any]:
        entry = entries.get(name)
        if entry is None or entry.dtype != dtype or len(entry.shape) != ndim:
            raise self.corrupt(f"it has no column {name!r} of {dtype} with {ndim} dims")
        width = 8 if dtype == "I64" else 1
        if math.prod(entry.shape) * width != entry.end - entry.begin:
            raise self.corrupt(f"its column {name!r} of shape {entry.shape} has {entry.end - entry.begin:,} bytes")
        self._starts[name] = entry.begin
        column = self._memory[entry.begin : entry.end]
        return (column.view("<i8") if width == 8 else column).reshape(entry.shape)

    def bring(self, spans: Spans) -> Rows:
        """The columns, with the rows of these spans read and verified; but not their digests."""
        rows = self.rows
        for name in _NUMBERS:
            self._bring_rows(name, spans)
        return rows

    def bring_digests(self, spans: Spans) -> NDArray[np.uint8]:
        """The column of digests, with these spans of it read and verified."""
        digests = self.rows.digests
        self._bring_rows("digests", spans)
        return digests

    def data(self) -> bytes:
        """All bytes of the file."""
        self._bring([(0, self.file.bytes)])
        return self._memory.tobytes()

    def _bring_rows(self, name: str, spans: Spans) -> None:
        if not self._there.all():
            column, start = getattr(self.rows, name), self._starts[name]
            width = column.nbytes // max(len(column), 1)
            self._bring((start + first * width, start + last * width) for first, last in spans)

    def _bring(self, spans: Iterable[tuple[int, int]]) -> None:
        wanted = np.zeros_like(self._there)
        for begin, end in spans:
            wanted[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES) if end > begin else 0] = True
        memory = memoryview(self._memory)  # type: ignore[arg-type]
        for number in np.flatnonzero(wanted & ~self._there).tolist():
            begin = number * BLOCK_BYTES
            block = memory[begin : min(begin + BLOCK_BYTES, self.file.bytes)]
            assert self._read is not None
            self._read(begin, block)
            if digest(block) != self.file.digests[number * 2 * DIGEST_BYTES :][: 2 * DIGEST_BYTES]:
                raise self.corrupt(f"bytes {begin:,} to {begin + block.nbytes:,} differ from their digest")
            self._there[number] = True
