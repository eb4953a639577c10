"""Tensors and their chunks: which boxes of a tensor lie in which bytes of which files, checked by array operations.

All chunks of a checkpoint are rows of one :class:`~..table.Table`. Before a row is used, all numbers of its tensor are
checked, its exact cover among them: if two chunks overlapped, readers of different parts would read different values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_shard.checkpoint.boxes import Box, coverage_fault, intersection, uncovered
from lightning_shard.checkpoint.format.blocks import DIGEST_BYTES
from lightning_shard.checkpoint.format.header import item_bytes
from lightning_shard.checkpoint.format.table import Integers, Rows, Table, columns_of
from lightning_shard.errors import CorruptCheckpointError


class Chunk(NamedTuple):
    """A box of a tensor, and the byte range in a file that has its elements in row-major order.

    ``offsets`` and ``sizes`` are in elements, one per dim. ``begin`` and ``end`` are bytes from the start of the file,
    whose index is ``file``. ``digests`` has one digest per block of ``block_bytes`` from ``begin`` on, or is empty.
    """

    file: int
    begin: int
    end: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: bytes = b""


@dataclass(eq=False, slots=True)
class TensorEntry:
    """A tensor in a manifest: its dtype by the format's name, its global shape, and its chunks.

    Attributes:
        span: Its rows of the table, ``[first, last)``.
        given: Its chunks, where they aren't rows of a table.
    """

    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int] = (0, 0)
    given: tuple[Chunk, ...] = ()
    table: ChunkTable | None = field(default=None, repr=False)
    number: int = 0
    """Its number in the table's list of tensors."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def chunk_count(self) -> int:
        return self.span[1] - self.span[0] if self.table is not None else len(self.given)

    @property
    def chunks(self) -> Sequence[Chunk]:
        """All chunks.

        Raises:
            CorruptCheckpointError: They don't cover the tensor exactly, or a number of one is out of range.
        """
        return self.given if self.table is None else self.table.chunks(self)


def overlaps(wanted: Sequence[tuple[TensorEntry, Box]]) -> Iterator[list[tuple[Chunk, Box]]]:
    """For each tensor and box, the chunks that overlap with the box, each with the intersection."""
    tables = {id(entry.table): entry.table for entry, _ in wanted}
    found = {
        key: iter(table.overlaps([pair for pair in wanted if pair[0].table is table]))
        for key, table in tables.items()
        if table is not None
    }
    for entry, box in wanted:
        if entry.table is not None:
            yield next(found[id(entry.table)])
        else:
            parts = ((chunk, intersection(chunk.offsets, chunk.sizes, box)) for chunk in entry.given)
            yield [(chunk, part) for chunk, part in parts if part is not None]


def rows_of(entries: Sequence[TensorEntry]) -> Rows:
    """The table of tensors whose chunks are given, without digests; sets each tensor's ``span``."""
    chunks: list[Chunk] = []
    for entry in entries:
        entry.span = len(chunks), len(chunks) + len(entry.given)
        chunks += entry.given
    dims = max((len(entry.shape) for entry in entries), default=0)
    file, begin, block = np.array([(chunk.file, chunk.begin, 0) for chunk in chunks], np.int64).reshape(-1, 3).T
    offsets = columns_of([chunk.offsets for chunk in chunks], dims, 0)
    sizes = columns_of([chunk.sizes for chunk in chunks], dims, 1)
    return Rows(file, begin, block, offsets, sizes, np.empty((0, DIGEST_BYTES), np.uint8))


class ChunkTable:
    """The rows of all tensors of a manifest.

    Args:
        table: The columns.
        tensors: Each tensor's section, name and entry; not the aliases.
        files: Each file's header bytes (row 0) and bytes (row 1), of shape (2, files).
        block_bytes: The size of digests' blocks; 0 if there are none.
        corrupt: Makes the error of a text.
    """

    def __init__(
        self,
        table: Table,
        tensors: Sequence[tuple[str, str, TensorEntry]],
        files: Integers,
        block_bytes: int,
        corrupt: Callable[[str], CorruptCheckpointError],
    ) -> None:
        self.table = table
        self.names = [(title, name) for title, name, _ in tensors]
        self.entries = [entry for _, _, entry in tensors]
        self._files = files
        self._block_bytes = block_bytes
        self._corrupt = corrupt
        self._sound = np.zeros(len(tensors), bool)
        for number, entry in enumerate(self.entries):
            entry.table, entry.number = self, number

    # -- checks -------------------------------------------------------------------------------------------------------

    @cached_property
    def _spans(self) -> Integers:
        """Each tensor's first and last row, of shape (tensors, 2)."""
        spans = np.array([entry.span for entry in self.entries], np.int64).reshape(-1, 2)
        count = len(self.table.rows.file)
        ends = spans[np.lexsort(spans.T[::-1])]
        at = np.concatenate([[0], ends[:, 1]])
        if (at[:-1] != ends[:, 0]).any() or at[-1] != count:
            raise self._corrupt(f"its tensors don't take the {count:,} rows of {self.table.file.path}, each once")
        return spans

    @cached_property
    def _shapes(self) -> Integers:
        """Each tensor's shape, padded to the table's dims."""
        dims, most = self.table.rows.offsets.shape[1], int(self._ndims.max(initial=0))
        if most > dims:
            raise self._corrupt(f"a tensor has {most} dims, and the boxes of {self.table.file.path} have {dims}")
        return columns_of([entry.shape for entry in self.entries], dims, 1)

    @cached_property
    def _widths(self) -> Integers:
        return np.array([item_bytes(entry.dtype) for entry in self.entries], np.int64)

    @cached_property
    def _ndims(self) -> Integers:
        return np.array([len(entry.shape) for entry in self.entries], np.int64)

    def check(self, entries: Iterable[TensorEntry]) -> None:
        """Read and check the rows of tensors."""
        faults = self.faults([entry.number for entry in entries])
        if faults:
            number, what = min(faults.items())
            title, name = self.names[number]
            raise self._corrupt(f"{title} tensor {name!r} {what}")

    def faults(self, numbers: Sequence[int]) -> dict[int, str]:
        """Read and check the rows of tensors, given by number; returns what is wrong, by the tensor's number."""
        asked = np.unique(np.asarray(numbers, np.int64))
        new = asked[~self._sound[asked]]
        if not len(new):
            return {}
        new = new[np.argsort(self._spans[new, 0], kind="stable")]
        spans = self._spans[new]
        rows = self.table.rows
        is_one_run = (spans[1:, 0] == spans[:-1, 1]).all()
        taken = slice(int(spans[0, 0]), int(spans[-1, 1])) if is_one_run else _ranges(spans)
        lengths = spans[:, 1] - spans[:, 0]
        owner = np.repeat(new, lengths)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        file, begin, block, offsets, sizes = (column[taken] for column in rows[:5])
        shapes = self._shapes[owner]
        found: dict[int, str] = {}

        def refuse(wrong: NDArray[np.bool_], what: Callable[[int], str]) -> None:
            for row in np.flatnonzero(wrong).tolist():
                found.setdefault(int(owner[row]), what(row))

        padding = np.arange(shapes.shape[1]) >= self._ndims[owner][:, None]
        outside = (offsets < 0) | (sizes < 0) | (offsets > shapes) | (sizes > shapes - offsets)
        outside |= padding & ((offsets != 0) | (sizes != 1))
        outside_rows = np.asarray(outside.any(axis=1))
        refuse(
            outside_rows,
            lambda row: (
                f"is damaged: a chunk at offsets {offsets[row].tolist()} with sizes {sizes[row].tolist()} isn't inside"
                f" the shape {shapes[row].tolist()}"
            ),
        )
        strange = (file < 0) | (file >= self._files.shape[1])
        refuse(strange, lambda row: f"refers to file {file[row]} of {self._files.shape[1]}")
        nbytes = np.where(outside_rows[:, None], 0, sizes).prod(axis=1) * self._widths[owner]
        headers, ends = self._files[:, np.where(strange, 0, file)] if self._files.shape[1] else (0 * file, 0 * file)
        refuse(
            (begin < headers) | (begin > ends) | (nbytes > ends - begin),
            lambda row: (
                f"has a chunk of {nbytes[row]:,} bytes at byte {begin[row]} of file {file[row]},"
                f" which has {ends[row]:,}"
            ),
        )
        blocks, stored = self._blocks(nbytes), len(rows.digests)
        refuse(
            (block < 0) | (block > stored) | (blocks > stored - block),
            lambda row: f"has {blocks[row]} digests from number {block[row]} on, of {stored}",
        )
        for index in np.flatnonzero(uncovered(self._shapes[new], bounds, offsets, sizes)).tolist():
            number = int(new[index])
            if number not in found:
                shape, (first, last) = self.entries[number].shape, self.entries[number].span
                why = coverage_fault(shape, rows.boxes(first, last, len(shape)))
                found[number] = f"has chunks that don't make it up: {why}"
        self._sound[new] = True
        self._sound[list(found)] = False
        return found

    def _blocks(self, nbytes: Integers) -> Integers:
        return -(-nbytes // self._block_bytes) if self._block_bytes else 0 * nbytes

    # -- chunks -------------------------------------------------------------------------------------------------------

    def chunks(self, entry: TensorEntry) -> list[Chunk]:
        """All chunks of a tensor."""
        self.check([entry])
        return self._chunks(np.arange(*entry.span), np.full(entry.chunk_count, entry.number))

    def files_of(self, entries: Sequence[TensorEntry]) -> list[int]:
        """The indices of the files that hold tensors."""
        self.check(entries)
        spans = self._spans[np.array([entry.number for entry in entries], np.int64)]
        return np.unique(self.table.rows.file[_ranges(spans)]).tolist()

    def start(self, entry: TensorEntry) -> tuple[int, int]:
        """The file and the first byte of a tensor's first chunk; it must have one."""
        self.check([entry])
        first = entry.span[0]
        return int(self.table.rows.file[first]), int(self.table.rows.begin[first])

    def _chunks(self, rows: Integers, owners: Integers) -> list[Chunk]:
        """Chunks by their rows, which have been checked, and their tensors' numbers."""
        file, begin, block, offsets, sizes, digests = self.table.rows
        nbytes = sizes[rows].prod(axis=1) * self._widths[owners]
        blocks = self._blocks(nbytes)
        first = block[rows]
        memory = memoryview(digests.reshape(-1))  # type: ignore[arg-type]
        numbers = (file[rows], begin[rows], begin[rows] + nbytes, first, first + blocks, self._ndims[owners])
        return [
            Chunk(
                number,
                start,
                end,
                tuple(corner[:ndim]),
                tuple(extent[:ndim]),
                memory[DIGEST_BYTES * a : DIGEST_BYTES * b].tobytes(),
            )
            for number, start, end, a, b, ndim, corner, extent in zip(
                *(column.tolist() for column in numbers), offsets[rows].tolist(), sizes[rows].tolist()
            )
        ]

    def overlaps(self, wanted: Sequence[tuple[TensorEntry, Box]]) -> Iterator[list[tuple[Chunk, Box]]]:
        """For each tensor and box, the chunks that overlap with the box, each with the intersection."""
        entries = [entry for entry, _ in wanted]
        self.check(entries)
        table = self.table.rows
        dims = table.offsets.shape[1]
        numbers = np.array([entry.number for entry in entries], np.int64)
        corners = columns_of([box.offsets for _, box in wanted], dims, 0)
        extents = columns_of([box.sizes for _, box in wanted], dims, 1)
        spans = self._spans[numbers]
        rows = _ranges(spans)
        asker = np.repeat(np.arange(len(wanted)), spans[:, 1] - spans[:, 0])
        low = np.maximum(table.offsets[rows], corners[asker])
        length = np.minimum(table.offsets[rows] + table.sizes[rows], (corners + extents)[asker]) - low
        hit = (length > 0).all(axis=1)
        asker = asker[hit]
        bounds = np.searchsorted(asker, np.arange(len(wanted) + 1)).tolist()
        chunks = self._chunks(rows[hit], numbers[asker])
        starts, lengths = low[hit].tolist(), length[hit].tolist()
        for (entry, _), first, last in zip(wanted, bounds, bounds[1:]):
            ndim = len(entry.shape)
            yield [(chunks[at], Box(tuple(starts[at][:ndim]), tuple(lengths[at][:ndim]))) for at in range(first, last)]

    # -- by file ------------------------------------------------------------------------------------------------------

    @cached_property
    def _by_file(self) -> tuple[Integers, Integers, Integers]:
        """Of tensors that are sound: rows sorted by file and position, their tensors, and each file's bounds."""
        numbers = np.flatnonzero(self._sound)
        spans = self._spans[numbers]
        rows, owners = _ranges(spans), np.repeat(numbers, spans[:, 1] - spans[:, 0])
        file, begin = self.table.rows.file[rows], self.table.rows.begin[rows]
        nbytes = self.table.rows.sizes[rows].prod(axis=1)
        order = np.lexsort((nbytes, begin, file))
        return rows[order], owners[order], np.searchsorted(file[order], np.arange(self._files.shape[1] + 1))

    def in_file(self, file: int) -> list[tuple[int, Chunk]]:
        """The chunks in a file of all tensors that have been checked, in order: (the tensor's number, chunk)."""
        rows, owners, bounds = self._by_file
        own = slice(bounds[file], bounds[file + 1])
        return list(zip(owners[own].tolist(), self._chunks(rows[own], owners[own])))


def _ranges(spans: Integers) -> Integers:
    """The numbers in all spans, one after another."""
    lengths = spans[:, 1] - spans[:, 0]
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(spans[:, 0] - before, lengths)
