"""A tensor's chunks: the boxes that make it up, and where in which file the bytes of each lie.

A large run has hundreds of thousands of chunks, most tensors are cut alike, and a rank needs few of the chunks of each.
So their text is only taken apart; boxes are made and checked once for all tensors that are cut alike
(:class:`Tiling`), and a chunk's numbers are looked at when it is asked for.
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
"""Models have few shapes, most of them in each layer."""
PARTS_KEPT = 1024
"""Of the boxes that are read of these."""
LONG_BYTES = 4096
"""Shorter text is faster taken apart chunk by chunk than by columns."""


class Chunk(NamedTuple):
    """A box of a tensor, and its bytes (row-major) in a file.

    ``offsets`` and ``sizes`` are in elements, one per dim; ``begin`` and ``end`` are bytes from the start of the file;
    ``digests`` holds one digest per block of ``block_bytes`` counted from ``begin``, or nothing.
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
    """All chunks of a tensor, checked, without an object for each.

    ``files``, ``begins`` and ``ends`` have a number for each chunk, ``tiling`` has their boxes. ``digests`` are all
    chunks', one after another; each chunk's end at its number of ``digest_ends``.
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
    """A tensor: its dtype by the format's name, its global shape, and its chunks, which make it up.

    Each of its elements is in one chunk: :class:`Chunks` sees to that.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)

    def check_coverage(self) -> None:
        """Raise CorruptCheckpointError if its chunks don't make it up, each element once."""
        if isinstance(self.chunks, Chunks):
            self.chunks.check_coverage()

    def columns(self) -> Columns:
        """All of its chunks at once; of a tensor that a manifest has."""
        assert isinstance(self.chunks, Chunks)
        return self.chunks.columns()

    def same_chunks(self, other: TensorEntry) -> bool:
        """Whether another tensor's are written in the same words: of the same files, bytes, boxes and digests."""
        assert isinstance(self.chunks, Chunks)
        assert isinstance(other.chunks, Chunks)
        return self.chunks.written_as(other.chunks)

    def overlapping(self, box: Box) -> list[tuple[Chunk, Box]]:
        """The chunks that hold a part of the box, each with that part."""
        if isinstance(self.chunks, Chunks):
            return self.chunks.overlapping(box)
        parts = ((chunk, intersection(chunk.offsets, chunk.sizes, box)) for chunk in self.chunks)
        return [(chunk, part) for chunk, part in parts if part is not None]

    def in_files(self, files: Collection[int]) -> Iterable[Chunk]:
        """The chunks that lie in some files, by number.

        Whether all together make up the tensor isn't looked at: who takes whole files sees that chunks make these up.
        """
        if isinstance(self.chunks, Chunks):
            return self.chunks.in_files(files)
        return (chunk for chunk in self.chunks if chunk.file in files)


class Chunks(Sequence[Chunk]):
    """A tensor's chunks as text, each checked when it is needed, and not kept.

    That together they make up the tensor is checked when they are first looked at, whichever of them is needed: readers
    of other parts would else read other values where two overlap.

    Args:
        text: Gives them, joined by commas.
        tile: Gives the tiling that the boxes are; raises if they are none.
        check: Gives a chunk of its text and its box; raises if its numbers don't fit.
        fit: Whether the numbers of all chunks fit.
        unchecked: Gives their text, where it doesn't matter what else is in it.
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
        """Those that hold a part of the box, each with that part."""
        texts, tiling = self._look()
        return [(self._check(texts[number], tiling.boxes[number]), part) for number, part in tiling.parts(box)]

    def columns(self) -> Columns:
        """All of them, by columns of their text where it is long and as expected; else one by one, as for errors."""
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
        """Whether their text is the same."""
        return self._unchecked() == other._unchecked()

    def in_files(self, files: Collection[int]) -> Iterator[Chunk]:
        """Those that lie in some files. The others' text, most of a large manifest, isn't looked at."""
        for text in chunk_texts_in(self._unchecked(), frozenset(files)):
            yield self._check(text, _box(_place(text)))

    def __len__(self) -> int:
        return len(self._look()[0])

    def __getitem__(self, index: Any) -> Any:
        return list(iter(self))[index]

    def __iter__(self) -> Iterator[Chunk]:
        """Their text is taken apart for this, as for their number: ``list(chunks)`` asks for both, ``iter`` for one."""
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
    """Boxes that make up a tensor, each element once. One object for all tensors that are cut alike, told by identity.

    Raises:
        ValueError: They don't make it up; says why.
    """

    def __init__(self, shape: tuple[int, ...], places: Places) -> None:
        self.shape = shape
        self.boxes: list[Box] = []
        for place in places:
            box = _box(place)
            if not len(box.offsets) == len(box.sizes) == len(shape) or any(
                offset + size > whole for offset, size, whole in zip(box.offsets, box.sizes, shape)
            ):
                raise ValueError(f"a chunk at {box.offsets} of {box.sizes} isn't inside of {shape}")
            self.boxes.append(box)
        fault = coverage_fault(shape, self.boxes)
        if fault is not None:
            raise ValueError(fault)
        self._numbers = {box: number for number, box in enumerate(self.boxes)}

    @cached_property
    def numels(self) -> Integers:
        """Of each box."""
        return np.array([box.numel for box in self.boxes], np.int64)

    @cached_property
    def in_row_major_order(self) -> list[int] | None:
        """The numbers of the boxes whose elements, one box after another, are the tensor's; None where there is no such
        order. Boxes of no elements are left out."""
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
        """Of the boxes that have elements."""
        return {box.sizes for box in self.boxes if box.numel}

    def parts(self, box: Box) -> list[tuple[int, Box]]:
        """The numbers of the boxes that overlap with this one, each with what they have in common."""
        number = self._numbers.get(box)
        # the layout that saved, as nearly always
        return [(number, box)] if number is not None and box.numel else _parts(self, box)

    def _search(self, box: Box) -> list[tuple[int, Box]]:
        found = ((number, own.intersect(box)) for number, own in enumerate(self.boxes))
        return [(number, part) for number, part in found if part is not None]


@lru_cache(maxsize=PARTS_KEPT)
def _parts(tiling: Tiling, box: Box) -> list[tuple[int, Box]]:
    return tiling._search(box)


tiling_of = lru_cache(maxsize=TILINGS_KEPT)(Tiling)
