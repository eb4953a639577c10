"""A tensor's chunks: the boxes that tile it, and the file and byte range of each. Parsed lazily.

A large run has hundreds of thousands of chunks. Most tensors are cut in the same way, and a rank needs few chunks of
each. So a tensor's chunk text is only split; boxes are parsed and checked once for all tensors with the same cuts
(:class:`Tiling`); and a chunk's numbers are parsed when the chunk is accessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from lightning_shard.checkpoint.boxes import Box, coverage_fault, intersection
from lightning_shard.checkpoint.format.blocks import Digest, digest_at
from lightning_shard.checkpoint.format.columns import Integers, Parsed, parse_columns
from lightning_shard.checkpoint.format.header import item_bytes
from lightning_shard.checkpoint.format.text import ChunkText, chunk_texts, chunk_texts_in

TILINGS_KEPT = 32
"""Size of the cache of tilings: models have few shapes, which repeat in each layer."""
PARTS_KEPT = 1024
"""Size of the cache of overlaps between a tiling and a box that is read."""
LONG_BYTES = 4096
"""Shorter text is faster parsed chunk by chunk than by columns."""


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
    digests: str = ""

    def block_digest(self, block: int) -> Digest:
        return digest_at(self.digests, block)


@dataclass(frozen=True, eq=False)
class Columns:
    """All chunks of a tensor, checked, in columns instead of an object for each.

    ``files``, ``begins`` and ``ends`` have one number per chunk, and ``tiling`` has their boxes. ``digests`` is the
    concatenation of all chunks' digests; chunk ``i``'s end at ``digest_ends[i]``.
    """

    files: Integers
    begins: Integers
    ends: Integers
    tiling: Tiling
    digests: bytes
    digest_ends: Integers

    @classmethod
    def of(cls, chunks: Sequence[Chunk], tiling: Tiling) -> Columns:
        numbers = np.array([chunk[:3] for chunk in chunks], np.int64).reshape(-1, 3)
        digits = np.array([len(chunk.digests) for chunk in chunks], np.int64)
        digests = "".join(chunk.digests for chunk in chunks).encode()
        return cls(numbers[:, 0], numbers[:, 1], numbers[:, 2], tiling, digests, digits.cumsum())

    @property
    def boxes(self) -> Sequence[Box]:
        return self.tiling.boxes

    def __len__(self) -> int:
        return len(self.boxes)

    def digests_of(self, number: int) -> str:
        first = int(self.digest_ends[number - 1]) if number else 0
        return self.digests[first : int(self.digest_ends[number])].decode()

    def chunk(self, number: int) -> Chunk:
        box = self.boxes[number]
        span = int(self.begins[number]), int(self.ends[number])
        return Chunk(int(self.files[number]), *span, box.offsets, box.sizes, self.digests_of(number))


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a manifest: its dtype by the format's name, its global shape, and its chunks.

    Each element is in exactly one chunk, which :class:`Chunks` checks.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def check_coverage(self) -> None:
        """Raise CorruptCheckpointError unless the chunks cover the tensor, each element exactly once."""
        if isinstance(self.chunks, Chunks):
            self.chunks.check_coverage()

    def columns(self) -> Columns:
        """All chunks at once. Only for an entry that was parsed from a manifest."""
        assert isinstance(self.chunks, Chunks)
        return self.chunks.columns()

    def same_chunks(self, other: TensorEntry) -> bool:
        """Whether another tensor's chunks have the same text: the same files, bytes, boxes and digests."""
        assert isinstance(self.chunks, Chunks)
        assert isinstance(other.chunks, Chunks)
        return self.chunks.written_as(other.chunks)

    def overlapping(self, box: Box) -> list[tuple[Chunk, Box]]:
        """The chunks that overlap with a box, each with the intersection."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.overlapping(box)
        parts = ((chunk, intersection(chunk.offsets, chunk.sizes, box)) for chunk in self.chunks)
        return [(chunk, part) for chunk, part in parts if part is not None]

    def in_files(self, files: Collection[int]) -> Iterable[Chunk]:
        """The chunks that lie in the files of these indices.

        Coverage of the tensor isn't checked: a caller that copies whole files checks that chunks cover the files.
        """
        if isinstance(self.chunks, Chunks):
            return self.chunks.in_files(files)
        return (chunk for chunk in self.chunks if chunk.file in files)


class Chunks(Sequence[Chunk]):
    """A tensor's chunks as text. Each is parsed and checked when it is needed, and not cached.

    Coverage of the whole tensor is checked on first access, whichever chunk is needed: if two chunks overlapped,
    readers of different parts could otherwise read different values.

    Args:
        text: Returns the chunks' text, joined by commas; checks its layout.
        tile: Returns the tiling of the boxes; raises if they don't tile the tensor.
        check: Makes a chunk from its text and box; raises if its numbers are invalid.
        fit: Whether the numbers of all chunks are valid.
        unchecked: Returns the chunks' text without checking its layout.
    """

    def __init__(
        self,
        text: Callable[[], bytes],
        tile: Callable[[Places], Tiling],
        check: Callable[[ChunkText, Box], Chunk],
        fit: Callable[[Parsed, Tiling], bool],
        unchecked: Callable[[], bytes],
    ) -> None:
        self._text = text
        self._tile = tile
        self._check = check
        self._fit = fit
        self._unchecked = unchecked
        self._tiling: Tiling | None = None

    def _look(self) -> tuple[list[ChunkText], Tiling]:
        texts = chunk_texts(self._text())
        if self._tiling is None:
            self._tiling = self._tile(tuple(map(_place, texts)))
        return texts, self._tiling

    def check_coverage(self) -> None:
        if self._tiling is None:
            self._look()

    def overlapping(self, box: Box) -> list[tuple[Chunk, Box]]:
        """The chunks that overlap with a box, each with the intersection."""
        texts, tiling = self._look()
        return [(self._check(texts[number], tiling.boxes[number]), part) for number, part in tiling.parts(box)]

    def columns(self) -> Columns:
        """All chunks: parsed by columns if the text is long and valid; else one by one, which raises the errors."""
        text = self._unchecked()
        parsed = parse_columns(text) if len(text) >= LONG_BYTES else None
        if parsed is not None:
            tiling = self._tile(parsed.places)
            if self._fit(parsed, tiling):
                self._tiling = tiling
                begins, ends = parsed.spans.T
                return Columns(parsed.files, begins, ends, tiling, parsed.digests, parsed.digits.cumsum())
        chunks = list(iter(self))
        assert self._tiling is not None
        return Columns.of(chunks, self._tiling)

    def written_as(self, other: Chunks) -> bool:
        """Whether both have the same text."""
        return self._unchecked() == other._unchecked()

    def in_files(self, files: Collection[int]) -> Iterator[Chunk]:
        """The chunks that lie in ``files``. The text of others, most of a large manifest, isn't parsed."""
        for text in chunk_texts_in(self._unchecked(), frozenset(files)):
            yield self._check(text, _box(_place(text)))

    def __len__(self) -> int:
        return len(self._look()[0])

    def __getitem__(self, index: Any) -> Any:
        return list(iter(self))[index]

    def __iter__(self) -> Iterator[Chunk]:
        """Splits the text, as does ``len``: ``list(chunks)`` splits it twice, ``list(iter(chunks))`` once."""
        texts, tiling = self._look()
        return map(self._check, texts, tiling.boxes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(iter(self)) == list(iter(other))

    __hash__ = None  # type: ignore[assignment]


Places = tuple[bytes, ...]
"""The boxes of a tensor's chunks as text."""
_place: Callable[[ChunkText], bytes] = itemgetter(3)


def _box(place: bytes) -> Box:
    fields = json.loads(b"{" + place + b"}")
    return Box(tuple(fields["offsets"]), tuple(fields["sizes"]))


class Tiling:
    """Boxes that cover a tensor, each element exactly once.

    Tensors with the same cuts share one object (:data:`tiling_of`), which is compared by identity.

    Raises:
        ValueError: The boxes don't cover the tensor; the message says why.
    """

    def __init__(self, shape: tuple[int, ...], places: Places) -> None:
        self.shape = shape
        self.boxes: list[Box] = []
        for place in places:
            box = _box(place)
            if not len(box.offsets) == len(box.sizes) == len(shape) or any(
                offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, shape)
            ):
                raise ValueError(
                    f"a chunk at offsets {box.offsets} with sizes {box.sizes} isn't inside the shape {shape}"
                )
            self.boxes.append(box)
        fault = coverage_fault(shape, self.boxes)
        if fault is not None:
            raise ValueError(fault)
        self._numbers = {box: number for number, box in enumerate(self.boxes)}

    @cached_property
    def numels(self) -> Integers:
        """The number of elements of each box."""
        return np.array([box.numel for box in self.boxes], np.int64)

    @cached_property
    def in_row_major_order(self) -> list[int] | None:
        """The order of boxes whose concatenation is the row-major tensor, as indices; None if there is none.

        Boxes without elements are left out.
        """
        numbers = sorted((n for n, box in enumerate(self.boxes) if box.numel), key=lambda n: self.boxes[n].offsets)
        position = 0
        for number in numbers:
            box = self.boxes[number]
            dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(box.sizes))
            if box.first(self.shape) != position or box.sizes[dim + 1 :] != self.shape[dim + 1 :]:
                return None
            position += box.numel
        return numbers

    @cached_property
    def sizes(self) -> set[tuple[int, ...]]:
        """The distinct sizes of the boxes that have elements."""
        return {box.sizes for box in self.boxes if box.numel}

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        """The indices of the boxes that overlap with ``box``, each with the intersection."""
        number = self._numbers.get(box)
        # fast path: same layout as the save, as nearly always
        return [(number, box)] if number is not None and box.numel else _parts(self, box)

    def _search(self, box: Box) -> list[tuple[int, Box]]:
        found = ((number, own.intersect(box)) for number, own in enumerate(self.boxes))
        return [(number, part) for number, part in found if part is not None]


@lru_cache(maxsize=PARTS_KEPT)
def _parts(tiling: Tiling, box: Box) -> list[tuple[int, Box]]:
    return tiling._search(box)


tiling_of = lru_cache(maxsize=TILINGS_KEPT)(Tiling)
