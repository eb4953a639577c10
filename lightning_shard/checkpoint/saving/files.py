"""Tensors to files: each file is streamed once, front to back, and digests are taken while the bytes are in cache.

A contiguous tensor on the CPU is written from its own memory; any other goes through one staging buffer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, digest
from lightning_shard.checkpoint.format.header import ALIGNMENT_BYTES, build_header, dtype_name
from lightning_shard.checkpoint.format.manifest import Chunk, FileEntry
from lightning_shard.checkpoint.memory import byte_view, is_plain
from lightning_shard.checkpoint.store import Buffer, Store

WRITE_STEP_BYTES = 2**18
"""How much is hashed, then written, at a time: small enough to stay in a core's cache, and for the kernel to find pages
for it without moving others out of the way, which larger writes to a nearly full page cache spend seconds on."""
STAGING_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Piece:
    """What a file gets of one tensor: ``data`` is the box ``box`` of the tensor ``name`` of global shape ``shape``."""

    name: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor


@dataclass
class Written:
    """One written file, and per piece the chunk in it; the chunks' ``file`` is filled in at the commit."""

    file: FileEntry
    chunks: list[tuple[Piece, Chunk]]


def write_file(
    store: Store, path: str, pieces: Sequence[Piece], metadata: dict[str, str], *, digests: bool, durable: bool
) -> Written:
    """Write one safetensors file.

    Pieces of wide dtypes come first, so that each is aligned to its elements; of these those of whole pages, so that
    all that are large begin on a page: their writes are a sixth faster.
    """
    ordered = sorted(
        pieces, key=lambda p: (-p.data.dtype.itemsize, p.data.nbytes % ALIGNMENT_BYTES != 0, p.name, p.box.offsets)
    )
    dtypes = [dtype_name(piece.data.dtype, piece.name) for piece in ordered]
    keys = _unambiguous([piece.name for piece in ordered])
    places = {
        f"lightning_shard.chunk:{key}": ";".join(
            ",".join(map(str, numbers)) for numbers in (piece.shape, piece.box.offsets, piece.box.sizes)
        )
        for key, piece in zip(keys, ordered)
        if piece.box.sizes != piece.shape
    }
    header, entries = build_header(
        [(key, dtype, piece.box.sizes) for key, dtype, piece in zip(keys, dtypes, ordered)], {**metadata, **places}
    )
    size = entries[-1].end if entries else len(header)
    sums: list[list[str]] = [[] for _ in ordered]
    store.write(path, _stream(header, ordered, sums if digests else None), size, durable=durable)
    chunks = [
        (piece, Chunk(-1, entry.begin, entry.end, piece.box.offsets, piece.box.sizes, "".join(found)))
        for piece, entry, found in zip(ordered, entries, sums)
    ]
    return Written(FileEntry(path, size, len(header), digest(header) if digests else None), chunks)


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


def _stream(header: bytes, pieces: Iterable[Piece], sums: list[list[str]] | None) -> Iterator[Buffer]:
    """The file's bytes in order; fills ``sums`` with each piece's block digests on the way."""
    yield memoryview(header)
    staging: list[Tensor] = []
    for index, piece in enumerate(pieces):
        hasher, left = xxhash.xxh3_128(), BLOCK_BYTES
        for buffer in _buffers(piece.data, staging):
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
        room.copy_(part)
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
