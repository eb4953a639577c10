"""Tensors to files: each file is streamed once, front to back, and digests are taken while the bytes are in cache.

A contiguous tensor on the CPU is written from its own memory; any other goes through one staging buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, digest
from lightning_shard.checkpoint.format.header import ALIGNMENT_BYTES, dtype_name, header_of, tensor_table
from lightning_shard.checkpoint.format.manifest import FileEntry
from lightning_shard.checkpoint.format.text import chunk_text, place_text, tensor_head
from lightning_shard.checkpoint.memory import byte_view, is_plain, resolved, settle
from lightning_shard.checkpoint.store import Buffer, Store

WRITE_STEP_BYTES = 2**18
"""How much is hashed, then written, at a time: small enough to stay in a core's cache, and for the kernel to find pages
for it without moving others out of the way, which larger writes to a nearly full page cache spend seconds on."""
STAGING_BYTES = 4 * 2**20
SMALL_BYTES = 2**15
"""Tensors up to this are copied together and written at once: a call for each would take longer than its bytes."""


class Outline(NamedTuple):
    """What a file gets of one tensor, without its elements: the box ``box`` of ``name`` of global shape ``shape``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class Piece:
    """The same with its elements."""

    name: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor

    @property
    def outline(self) -> Outline:
        return Outline(self.name, self.data.dtype, self.shape, self.box)


@dataclass(frozen=True)
class FilePlan:
    """How pieces lie in a file: follows from their outlines, and so is the same from save to save of a run.

    Attributes:
        order: Of the pieces in the file, by their numbers.
        outlines: In that order.
        header: The header's JSON of tensors.
        places: For the header's metadata, which box of its tensor each piece is.
        data_bytes: Of all pieces.
    """

    order: tuple[int, ...]
    outlines: tuple[Outline, ...]
    header: str
    places: dict[str, str]
    data_bytes: int
    table: Table


class Table(NamedTuple):
    """What the manifest is told of a file's pieces, column by column, in its own words.

    Attributes:
        names: Of the tensors.
        heads: The tensors' dtypes and global shapes, see :func:`~..format.text.tensor_head`.
        places: The boxes of them, see :func:`~..format.text.place_text`.
        spans: Where their bytes begin and end, counted from where the file's data begins.
    """

    names: list[str]
    heads: list[str]
    places: list[str]
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Written:
    """One written file and the chunks in it, as they travel: a table that is ready-made, and what each save finds anew.

    Attributes:
        digests: Of each chunk's blocks, joined.
    """

    file: FileEntry
    table: Table
    digests: list[str]

    def chunks(self, number: int) -> Iterator[tuple[str, str, str, str]]:
        """Of each chunk the tensor's name and head, the place, and the chunk's text in a manifest.

        Args:
            number: The file's there.
        """
        base = self.file.header_bytes
        for name, head, place, (begin, end), digests in zip(*self.table, self.digests, strict=True):
            yield name, head, place, chunk_text(number, base + begin, base + end, place, digests)


def plan_file(outlines: Sequence[Outline]) -> FilePlan:
    """Lay pieces out.

    Those of wide dtypes come first, so that each is aligned to its elements; of these those of whole pages, so that
    all that are large begin on a page: their writes are a sixth faster.
    """
    order = sorted(range(len(outlines)), key=lambda number: _position(outlines[number]))
    ordered = [outlines[number] for number in order]
    dtypes = [dtype_name(piece.dtype, piece.name) for piece in ordered]
    keys = _unambiguous([piece.name for piece in ordered])
    places = {
        f"lightning_shard.chunk:{key}": ";".join(
            ",".join(map(str, numbers)) for numbers in (piece.shape, piece.box.offsets, piece.box.sizes)
        )
        for key, piece in zip(keys, ordered)
        if piece.box.sizes != piece.shape
    }
    header, spans = tensor_table([(key, dtype, piece.box.sizes) for key, dtype, piece in zip(keys, dtypes, ordered)])
    known: dict[str, str] = {}  # equal texts become one object, which travels once

    def once(text: str) -> str:
        return known.setdefault(text, text)

    table = Table(
        [piece.name for piece in ordered],
        [once(tensor_head(dtype, piece.shape)) for piece, dtype in zip(ordered, dtypes)],
        [once(place_text(piece.box.offsets, piece.box.sizes)) for piece in ordered],
        spans,
    )
    data_bytes = spans[-1][1] if spans else 0
    return FilePlan(tuple(order), tuple(ordered), header, places, data_bytes, table)


def _position(piece: Outline) -> tuple[Any, ...]:
    nbytes = piece.box.numel * piece.dtype.itemsize
    return -piece.dtype.itemsize, nbytes % ALIGNMENT_BYTES != 0, piece.name, piece.box.offsets


def file_metadata(attempt: str, section: str) -> dict[str, str]:
    """What a file says of itself, for people and for salvage."""
    return {"format": "pt", "lightning_shard.attempt": attempt, "lightning_shard.section": section}


def write_pieces(
    store: Store, path: str, pieces: Sequence[Piece], metadata: dict[str, str], *, digests: bool, durable: bool
) -> Written:
    """Write one safetensors file of pieces in any order."""
    plan = plan_file([piece.outline for piece in pieces])
    data = [pieces[number].data for number in plan.order]
    settle(data)
    return write_file(store, path, plan, data, metadata, digests=digests, durable=durable)


def write_file(
    store: Store,
    path: str,
    plan: FilePlan,
    data: Sequence[Tensor],
    metadata: dict[str, str],
    *,
    digests: bool,
    durable: bool,
) -> Written:
    """Write one safetensors file, of the elements of each of the plan's pieces in their order."""
    header = header_of(plan.header, {**metadata, **plan.places})
    size = len(header) + plan.data_bytes
    sums: list[list[str]] = [[] for _ in data]
    store.write(path, _stream(header, data, sums if digests else None), size, durable=durable)
    entry = FileEntry(path, size, len(header), digest(header) if digests else None)
    return Written(entry, plan.table, ["".join(found) for found in sums])


def write_json(store: Store, path: str, tree: Any, *, digests: bool, durable: bool) -> FileEntry:
    """Write one file of JSON."""
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    store.write(path, [memoryview(data)], len(data), durable=durable)
    return FileEntry(path, len(data), 0, digest(data) if digests else None)


def _unambiguous(names: Sequence[str]) -> list[str]:
    """A key per piece: the tensor's name, with ``#2`` and so on where one file holds several chunks of it."""
    taken = set(names)
    seen: set[str] = set()
    keys = []
    for name in names:
        key, number = name, 1
        while key in seen or (number > 1 and key in taken):
            number += 1
            key = f"{name}#{number}"
        seen.add(key)
        keys.append(key)
    return keys


def _stream(header: bytes, data: Iterable[Tensor], sums: list[list[str]] | None) -> Iterator[Buffer]:
    """The file's bytes in order; fills ``sums`` with each tensor's block digests on the way."""
    yield memoryview(header)
    staging: list[Tensor] = []
    small: list[tuple[int, Tensor]] = []
    filled = 0
    for index, tensor in enumerate(data):
        fits = tensor.nbytes <= min(SMALL_BYTES, WRITE_STEP_BYTES, BLOCK_BYTES) and is_plain(tensor)
        if small and not (fits and filled + tensor.nbytes <= WRITE_STEP_BYTES and tensor.dtype == small[0][1].dtype):
            yield _together(small, sums)
            small, filled = [], 0
        if fits:
            small.append((index, tensor))
            filled += tensor.nbytes
            continue
        hasher, left = xxhash.xxh3_128(), BLOCK_BYTES
        for buffer in _buffers(tensor, staging):
            for start, stop in _steps(buffer.nbytes, left):
                step = buffer[start:stop]
                if sums is not None:
                    hasher.update(step)
                    left -= step.nbytes
                    if left == 0:
                        sums[index].append(hasher.hexdigest())
                        hasher, left = xxhash.xxh3_128(), BLOCK_BYTES
                yield step
        if sums is not None and left < BLOCK_BYTES:
            sums[index].append(hasher.hexdigest())
    if small:
        yield _together(small, sums)


def _together(numbered: Sequence[tuple[int, Tensor]], sums: list[list[str]] | None) -> Buffer:
    """A copy of the bytes of small tensors of one dtype, each a digest block."""
    memory, begin = byte_view(torch.cat([tensor.reshape(-1) for _, tensor in numbered])), 0
    for index, tensor in numbered:
        end = begin + tensor.nbytes
        if sums is not None and begin < end:
            sums[index].append(digest(memory[begin:end]))
        begin = end
    return memory


def _steps(nbytes: int, to_boundary: int) -> Iterator[tuple[int, int]]:
    """Cut a buffer so that no step crosses a block's end, the next of which is ``to_boundary`` bytes away."""
    start = 0
    while start < nbytes:
        stop = min(nbytes, start + WRITE_STEP_BYTES, start + (to_boundary or BLOCK_BYTES))
        to_boundary = (to_boundary or BLOCK_BYTES) - (stop - start)
        yield start, stop
        start = stop


def _buffers(tensor: Tensor, staging: list[Tensor]) -> Iterator[Buffer]:
    """A tensor's bytes in row-major order: its own memory, or parts of it copied into a staging buffer."""
    if is_plain(tensor):
        yield byte_view(tensor)
        return
    if not staging:
        staging.append(torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda"))
    for part in _parts(tensor, STAGING_BYTES):
        nbytes = part.numel() * part.element_size()
        room = staging[0][:nbytes].view(part.dtype).view(part.shape)
        room.copy_(resolved(part))
        yield byte_view(room)


def _parts(tensor: Tensor, limit_bytes: int) -> Iterator[Tensor]:
    """Views that follow on one another in row-major order, none larger than the limit."""
    if tensor.numel() * tensor.element_size() <= limit_bytes:
        if tensor.numel():
            yield tensor
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    rows = limit_bytes // row_bytes
    if rows == 0:
        for row in tensor:
            yield from _parts(row, limit_bytes)
    else:
        for first in range(0, tensor.shape[0], rows):
            yield tensor[first : first + rows]
