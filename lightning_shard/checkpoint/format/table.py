"""The table of chunks: a safetensors file of columns of numbers, one row per chunk, beside the manifest.

The manifest has the file's length and a digest of each block of it, so a reader may verify the part that it reads;
this one reads it whole. Specified in docs/format.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import DIGEST_BYTES, digest
from lightning_shard.checkpoint.format.header import HeaderEntry, layout_fault, parse_header
from lightning_shard.errors import CorruptCheckpointError

BLOCK_BYTES = 4 * 2**20
"""Each block of the file has a digest in the manifest; fixed by the format. The file's header is in the first."""
Integers = NDArray[np.int64]
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

    @classmethod
    def none(cls) -> Rows:
        no_number, no_box = np.empty(0, np.int64), np.empty((0, 0), np.int64)
        return cls(no_number, no_number, no_number, no_box, no_box, np.empty((0, DIGEST_BYTES), np.uint8))

    @classmethod
    def joined(cls, parts: Sequence[Rows], files: Sequence[int]) -> Rows:
        """The rows of several tables, one after another; ``files``: where each one's files begin among those of all."""
        dims = max(part.sizes.shape[1] for part in parts)
        digests = np.cumsum([0, *(len(part.digests) for part in parts)]).tolist()
        return cls(
            np.concatenate([part.file + before for part, before in zip(parts, files)]),
            np.concatenate([part.begin for part in parts]),
            np.concatenate([part.block + before for part, before in zip(parts, digests)]),
            np.concatenate([_padded(part.offsets, dims, 0) for part in parts]),
            np.concatenate([_padded(part.sizes, dims, 1) for part in parts]),
            np.concatenate([part.digests for part in parts]),
        )

    def taken(self, order: Integers) -> Rows:
        """Some of the rows, with the digests of all."""
        file, begin, block, offsets, sizes = (column[order] for column in self[:5])
        return Rows(file, begin, block, offsets, sizes, self.digests)

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


def _padded(numbers: Integers, dims: int, fill: int) -> Integers:
    """Offsets or sizes with more dims."""
    return np.pad(numbers, ((0, 0), (0, dims - numbers.shape[1])), constant_values=fill)


def table_file(path: str, data: bytes) -> TableFile:
    view = memoryview(data)
    digests = (digest(view[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES))
    return TableFile(path, len(data), "".join(digests))


class Table:
    """A table's columns, verified by the manifest's digests when they are first needed.

    Args:
        file: The manifest's entry.
        source: The path, for errors.
        load: Returns the file's bytes.
    """

    def __init__(self, file: TableFile, source: str, load: Callable[[], bytes | bytearray]) -> None:
        self.file = file
        self._source = source
        self._load = load

    @cached_property
    def data(self) -> bytes | bytearray:
        """All bytes of the file."""
        data = self._load()
        if len(data) != self.file.bytes:
            raise self.corrupt(f"it has {len(data):,} bytes instead of {self.file.bytes:,}")
        view = memoryview(data)
        for number, begin in enumerate(range(0, len(data), BLOCK_BYTES)):
            block = view[begin : begin + BLOCK_BYTES]
            if digest(block) != self.file.digests[number * 2 * DIGEST_BYTES :][: 2 * DIGEST_BYTES]:
                raise self.corrupt(f"bytes {begin:,} to {begin + block.nbytes:,} differ from their digest")
        return data

    def corrupt(self, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._source}: {what}: use another checkpoint.")

    @cached_property
    def rows(self) -> Rows:
        first = bytes(self.data[:BLOCK_BYTES])
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
        count = math.prod(entry.shape)
        return np.frombuffer(self.data, "<i8" if width == 8 else np.uint8, count, entry.begin).reshape(entry.shape)
