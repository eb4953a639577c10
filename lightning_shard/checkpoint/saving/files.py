"""Writes tensors to safetensors files: streams each file once, and hashes the bytes while they are in the CPU cache.

A contiguous CPU tensor is written from its own memory; any other goes through a staging buffer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.engine import Digests
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES, digest, digest_bytes
from lightning_shard.checkpoint.format.header import ALIGNMENT_BYTES, dtype_name, header_of, tensor_table
from lightning_shard.checkpoint.format.manifest import FileEntry
from lightning_shard.checkpoint.format.table import Rows, columns_of
from lightning_shard.checkpoint.memory import byte_view, is_plain, narrow, resolved
from lightning_shard.checkpoint.store import Buffer, Store

WRITE_STEP_BYTES = 2**18
"""How much is hashed and then written at a time. Small enough to stay in a core's cache, and for the kernel to find
free pages: larger writes to a nearly full page cache spend seconds on moving other pages."""
STAGING_BYTES = 4 * 2**20
SMALL_BYTES = 2**15
"""Tensors up to this size are copied together and written in one call, since a call costs more than their bytes."""


class Piece(NamedTuple):
    """A box of tensor ``name``, of global shape ``shape``, in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class FilePlan:
    """The arrangement of pieces in a file. It has none of their elements, so it is the same from save to save.

    Attributes:
        order: The pieces' numbers, in the file's order.
        pieces: The pieces, in the file's order.
        header: The header's JSON of tensors, without metadata.
        places: Entries of the header's metadata: the box that a piece is of its tensor.
        data_bytes: Bytes of all pieces.
        tensors: JSON of the pieces' tensors: an array of ``[name, dtype, shape]``. Ranks that write parts of the same
            tensors have equal texts, which are parsed once.
        rows: The pieces' rows of the table, without digests; bytes are counted from the beginning of the data section.
    """

    order: tuple[int, ...]
    pieces: tuple[Piece, ...]
    header: str
    places: dict[str, str]
    data_bytes: int
    tensors: str
    rows: Rows


@dataclass(frozen=True)
class Written:
    """One written file, as an account has it; see :class:`FilePlan` for ``tensors``."""

    file: FileEntry
    tensors: str
    rows: Rows


def plan_file(pieces: Sequence[Piece]) -> FilePlan:
    """Arrange pieces in a file.

    Wider dtypes come first, so that each piece is aligned to its element size. Within a width, pieces whose size is a
    multiple of a page come first, so that most large ones begin on a page: their writes are a sixth faster.
    """

    def position(number: int) -> tuple[Any, ...]:
        piece = pieces[number]
        width = piece.dtype.itemsize
        return -width, piece.box.numel * width % ALIGNMENT_BYTES != 0, piece.name, piece.box.offsets

    order = sorted(range(len(pieces)), key=position)
    ordered = [pieces[number] for number in order]
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
    dims = max((len(piece.shape) for piece in ordered), default=0)
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    blocks = -(-(ends - begins) // BLOCK_BYTES)
    rows = Rows(
        np.zeros_like(begins),
        begins,
        np.cumsum(blocks) - blocks,
        columns_of([piece.box.offsets for piece in ordered], dims, 0),
        columns_of([piece.box.sizes for piece in ordered], dims, 1),
        Rows.none().digests,
    )
    tensors = json.dumps([(piece.name, dtype, piece.shape) for piece, dtype in zip(ordered, dtypes)])
    return FilePlan(tuple(order), tuple(ordered), header, places, spans[-1][1] if spans else 0, tensors, rows)


def arranged(pieces: Sequence[tuple[Piece, Tensor]]) -> tuple[FilePlan, list[Tensor]]:
    """The plan of a file of pieces, each given with its elements, and the elements in the plan's order."""
    plan = plan_file([piece for piece, _ in pieces])
    return plan, [pieces[number][1] for number in plan.order]


def file_metadata(attempt: str, section: str) -> dict[str, str]:
    """The metadata in a file's header, for people and for salvage."""
    return {"format": "pt", "lightning_shard.attempt": attempt, "lightning_shard.section": section}


def write_file(
    store: Store,
    path: str,
    plan: FilePlan,
    data: Sequence[Tensor],
    metadata: dict[str, str],
    *,
    digests: bool,
    durable: bool,
    stop: threading.Event | None = None,
) -> Written:
    """Write one safetensors file by a plan; ``data`` has the elements of the plan's pieces, in the plan's order.

    Raises:
        InterruptedError: ``stop`` was set meanwhile.
    """
    header = header_of(plan.header, {**metadata, **plan.places})
    size = len(header) + plan.data_bytes
    sums: list[bytes] = []
    store.write(path, _stream(header, data, sums if digests else None, stop), size, durable=durable)
    entry = FileEntry(path, size, len(header), digest(header) if digests else None)
    rows = plan.rows._replace(
        begin=plan.rows.begin + len(header),
        block=plan.rows.block * digests,
        digests=np.frombuffer(b"".join(sums), np.uint8).reshape(-1, DIGEST_BYTES),
    )
    return Written(entry, plan.tensors, rows)


def write_json(store: Store, path: str, tree: Any, *, digests: bool, durable: bool) -> FileEntry:
    """Write one JSON file."""
    data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    store.write(path, [memoryview(data)], len(data), durable=durable)
    return FileEntry(path, len(data), 0, digest(data) if digests else None)


def _unambiguous(names: Sequence[str]) -> list[str]:
    """A unique key for each piece: the tensor's name, plus ``#2`` and so on for further chunks of it in one file."""
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


def _stream(
    header: bytes, data: Iterable[Tensor], sums: list[bytes] | None, stop: threading.Event | None
) -> Iterator[Buffer]:
    """Yield the file's bytes in order; adds the tensors' block digests to ``sums`` on the way."""
    yield memoryview(header)
    staging: list[Tensor] = []
    small: list[Tensor] = []
    filled = 0
    digests = Digests(BLOCK_BYTES, sums.append) if sums is not None else None
    for tensor in data:
        fits = tensor.nbytes <= min(SMALL_BYTES, WRITE_STEP_BYTES, BLOCK_BYTES) and is_plain(tensor)
        if small and not (fits and filled + tensor.nbytes <= WRITE_STEP_BYTES and tensor.dtype == small[0].dtype):
            yield _together(small, sums)
            small, filled = [], 0
        if fits:
            small.append(tensor)
            filled += tensor.nbytes
            continue
        for buffer in _buffers(tensor, staging):
            for start in range(0, buffer.nbytes, WRITE_STEP_BYTES):
                if stop is not None and stop.is_set():
                    raise InterruptedError("another file of this rank couldn't be written")
                step = buffer[start : start + WRITE_STEP_BYTES]
                if digests is not None:
                    digests.update(step)
                yield step
        if digests is not None:
            digests.end()
    if small:
        yield _together(small, sums)


def _together(tensors: Sequence[Tensor], sums: list[bytes] | None) -> Buffer:
    """A copy of the bytes of small tensors of one dtype; each tensor is one digest block."""
    memory, begin = byte_view(torch.cat([tensor.reshape(-1) for tensor in tensors])), 0
    for tensor in tensors:
        end = begin + tensor.nbytes
        if sums is not None and begin < end:
            sums.append(digest_bytes(memory[begin:end]))
        begin = end
    return memory


def _buffers(tensor: Tensor, staging: list[Tensor]) -> Iterator[Buffer]:
    """Yield a tensor's bytes in row-major order: its own memory, or parts copied into the staging buffer."""
    if is_plain(tensor):
        yield byte_view(tensor)
        return
    if not staging:
        staging.append(torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda"))
    for box in slabs(Box.whole(tensor.shape), STAGING_BYTES // tensor.element_size()):
        part = narrow(tensor, box)
        room = staging[0][: part.nbytes].view(part.dtype).view(part.shape)
        room.copy_(resolved(part))
        yield byte_view(room)
