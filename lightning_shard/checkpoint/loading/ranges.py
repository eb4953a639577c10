"""Reads boxes of stored tensors: computes byte ranges, merges adjacent ones, and fetches them with a few threads.

A range that is contiguous in the target tensor, too, is read in place. Any other is copied from a memory map of the
file, if the store can map it, or through a scratch buffer. With digests, whole blocks are read and verified, so each
edge of a box costs up to one block.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, rows_of
from lightning_shard.checkpoint.engine import each, groups, read_blocks, thread_memory
from lightning_shard.checkpoint.format.blocks import DIGEST_BYTES, check_digest, digest_at, digest_bytes
from lightning_shard.checkpoint.format.chunks import Chunk, overlaps
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.memory import byte_view, is_plain, narrow, settle
from lightning_shard.checkpoint.store import Buffer, Reader, Store
from lightning_shard.errors import CheckpointError, CorruptCheckpointError

if TYPE_CHECKING:
    from lightning_shard.checkpoint.loading.stored import StoredTensor

BATCH_BYTES = 8 * 2**20
"""How much one thread fetches from one file at a time; the store's ``step_bytes`` if that is larger. Times the store's
``requests``, it bounds the bytes in flight."""
FEW_BYTES = 2**20
"""Reading up to this many bytes from a disk is faster than starting a thread."""
MAPPED_BYTES = 2**18
"""Shorter ranges are faster read than mapped."""
SPAN_BYTES = 16 * 2**20
"""A strided part of a chunk is read including its gaps, in spans of up to this length."""
LAYOUTS_KEPT = 1024
"""Size of the caches of strides and spans, which repeat since most tensors are cut like others."""
_SCRATCH_ALIGNMENT = 64


class Read(NamedTuple):
    """One read: fill ``target`` (shape ``box.sizes``, any strides and device) with a box of a stored tensor.

    ``memory``: the target's bytes, if the target is already known to be a contiguous CPU tensor; else None.
    """

    stored: StoredTensor
    box: Box
    target: Tensor
    memory: Buffer | None = None


class _Job(NamedTuple):
    """One byte range of a file, its expected digests, and its destination.

    ``digests`` has one for each block of ``block_bytes``, the last of which may be shorter; it is empty without
    digests. ``into`` is the memory to read into, or None for scratch. In that case ``strides`` and ``offset`` (in
    elements) select the elements of the range to copy to ``target``.
    """

    name: str
    begin: int
    end: int
    into: Buffer | None
    digests: bytes
    block_bytes: int
    dtype: torch.dtype = torch.uint8
    target: Tensor | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0


def read_boxes(store: Store, manifest: Manifest, reads: Iterable[Read], *, verify: bool) -> int:
    """Carry out reads, and return the bytes read. If there are digests, ``verify`` checks every block touched.

    Raises:
        CorruptCheckpointError: A file is missing or too short, a digest differs, or chunks don't cover the tensor.
    """
    reads = list(reads)
    settle([read.target for read in reads])
    plan = plan_reads(manifest, reads, verify=verify)
    batch_bytes = max(BATCH_BYTES, store.step_bytes)
    sizes = [sum([job.end - job.begin for job in jobs]) for _, jobs in plan]
    threads = min(store.requests, sum(-(-size // batch_bytes) for size in sizes))
    if sum(sizes) <= FEW_BYTES and not store.is_remote:
        threads = 1
    for _ in each(lambda batch: _fetch(store, *batch), _batches(plan, batch_bytes), threads):
        pass
    return sum(sizes)


def plan_reads(manifest: Manifest, reads: Sequence[Read], *, verify: bool) -> list[tuple[str, list[_Job]]]:
    """Plan reads: each file's path, and the ranges of it to read, sorted by position.

    Bytes that are contiguous in a file and in memory are one range of any length; :func:`_batches` cuts it later.
    """
    per_file: dict[int, list[_Job]] = {}
    block_bytes = manifest.block_bytes if verify else 0
    for read, found in zip(reads, overlaps([(read.stored.entry, read.box) for read in reads])):
        (stored, box, target, memory), name = read, read.stored.name
        is_alike = target.dtype == DTYPES[stored.entry.dtype] and (memory is not None or is_plain(target))
        if is_alike and len(found) == 1 and (chunk := found[0][0]).sizes == box.sizes == found[0][1].sizes:
            # one range, as where the layout is that of the save
            memory = byte_view(target) if memory is None else memory
            job = _Job(name, chunk.begin, chunk.end, memory, chunk.digests if block_bytes else b"", block_bytes)
            per_file.setdefault(chunk.file, []).append(job)
        # chunks don't overlap, so the parts cover the box exactly if their sizes add up to it
        elif sum(part.numel for _, part in found) != box.numel:
            raise manifest.corrupt(f"the chunks of {name!r} don't make up {box}")
        else:
            for chunk, part in found:
                room, inside = narrow(target, part.within(box)), part.within(Box(chunk.offsets, chunk.sizes))
                jobs = _jobs(read, chunk, inside, room, block_bytes if chunk.digests else 0)
                per_file.setdefault(chunk.file, []).extend(jobs)
    return [(manifest.files[file].path, sorted(jobs, key=itemgetter(1))) for file, jobs in sorted(per_file.items())]


def _jobs(read: Read, chunk: Chunk, region: Box, target: Tensor, block_bytes: int) -> Iterator[_Job]:
    """Jobs for one region of a chunk: in place, or spans of up to :data:`SPAN_BYTES`; with digests, whole blocks."""
    dtype = DTYPES[read.stored.entry.dtype]
    first, last = _span(region, chunk.sizes)
    if last - first == region.numel and target.dtype == dtype and is_plain(target):
        yield from _jobs_in_place(read, chunk, (first, last), target, block_bytes)
    elif (last - first) * dtype.itemsize <= SPAN_BYTES:
        yield _scratch_job(read, chunk, (first, last), target, _strides(chunk.sizes), block_bytes)
    else:
        dim = next(dim for dim, size in enumerate(region.sizes) if size > 1)
        rows = max(1, SPAN_BYTES // (math.prod(chunk.sizes[dim + 1 :]) * dtype.itemsize))
        for start in range(0, region.sizes[dim], rows):
            stop = min(start + rows, region.sizes[dim])
            part, room = rows_of(region, dim, start, stop), target.narrow(dim, start, stop - start)
            yield from _jobs(read, chunk, part, room, block_bytes)


def _jobs_in_place(
    read: Read, chunk: Chunk, elements: tuple[int, int], target: Tensor, block_bytes: int
) -> Iterator[_Job]:
    """Jobs for elements that are contiguous in the target, too; blocks that extend beyond them go through scratch."""
    width = target.element_size()
    first, last = elements[0] * width, elements[1] * width
    memory = byte_view(target)
    whole_from, whole_to = first, last
    if block_bytes:
        whole_from = min(first + -first % block_bytes, last)
        whole_to = max(last if last == chunk.end - chunk.begin else last - last % block_bytes, whole_from)
    for begin, end, whole in ((first, whole_from, False), (whole_from, whole_to, True), (whole_to, last, False)):
        if begin == end:
            continue
        if whole:
            into, digests = memory[begin - first : end - first], _digests(chunk.digests, begin, end, block_bytes)
            yield _Job(read.stored.name, chunk.begin + begin, chunk.begin + end, into, digests, block_bytes)
        else:
            part = target.view(-1)[(begin - first) // width : (end - first) // width]
            yield _scratch_job(read, chunk, (begin // width, end // width), part, (1,), block_bytes)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _span(region: Box, chunk_sizes: tuple[int, ...]) -> tuple[int, int]:
    """[first, last + 1) of a region's elements, as flat indices in the row-major chunk."""
    if region.sizes == chunk_sizes:
        return 0, region.numel
    first = region.first(chunk_sizes)
    return first, first + sum((size - 1) * stride for size, stride in zip(region.sizes, _strides(chunk_sizes))) + 1


def _scratch_job(
    read: Read, chunk: Chunk, elements: tuple[int, int], target: Tensor, strides: tuple[int, ...], block_bytes: int
) -> _Job:
    """A job that reads a span of a chunk, extended to whole blocks, and copies some of its elements to ``target``."""
    dtype = DTYPES[read.stored.entry.dtype]
    width = dtype.itemsize
    begin, end = elements[0] * width, elements[1] * width
    if block_bytes:
        begin -= begin % block_bytes
        end = min(end + -end % block_bytes, chunk.end - chunk.begin)
    return _Job(
        read.stored.name,
        chunk.begin + begin,
        chunk.begin + end,
        None,
        _digests(chunk.digests, begin, end, block_bytes),
        block_bytes,
        dtype,
        target,
        strides,
        elements[0] - begin // width,
    )


def _digests(digests: bytes, begin: int, end: int, block_bytes: int) -> bytes:
    """The digests of the blocks from byte ``begin``, a block boundary, to ``end``; empty without digests."""
    if not digests or not block_bytes:
        return b""
    assert begin % block_bytes == 0
    first, last = begin // block_bytes, -(-end // block_bytes)
    return digests[first * DIGEST_BYTES : last * DIGEST_BYTES]


def _batches(plan: Iterable[tuple[str, Sequence[_Job]]], batch_bytes: int) -> Iterator[tuple[str, list[_Job]]]:
    """Group jobs of one file into batches of up to ``batch_bytes``, or of a single longer job."""
    for path, jobs in plan:
        cut = itertools.chain.from_iterable(_cut(job, batch_bytes) for job in jobs)
        for batch in groups(cut, lambda job: job.end - job.begin, batch_bytes):
            yield path, batch


def _cut(job: _Job, nbytes: int) -> Iterator[_Job]:
    """Cut a job that is read in place into parts of up to ``nbytes``; with digests, of whole blocks, at least one."""
    if job.into is None or job.into.nbytes <= nbytes:
        yield job
        return
    step = max(nbytes // job.block_bytes, 1) * job.block_bytes if job.digests else nbytes
    for begin in range(0, job.end - job.begin, step):
        end = min(begin + step, job.end - job.begin)
        digests = _digests(job.digests, begin, end, job.block_bytes)
        yield _Job(job.name, job.begin + begin, job.begin + end, job.into[begin:end], digests, job.block_bytes)


@contextlib.contextmanager
def naming_what_fails(store: Store, path: str, name: str | None = None) -> Iterator[None]:
    """Convert errors of reading a file, for a tensor if it is named, to our own; without a file it is damaged."""
    holds = "" if name is None else f" holds a part of {name!r}"
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        missing = f"{store.root}/{path} is missing{holds and f', and{holds}'}"
        raise CorruptCheckpointError(f"{missing}: use another checkpoint.") from error
    except (OSError, MemoryError) as error:
        which = f"{store.root}/{path}{holds and f', which{holds},'}"
        raise CheckpointError(f"{which} can't be read: {type(error).__name__}: {error}") from error
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{store.root}: {error}{holds and f' It{holds}.'}") from error


def _fetch(store: Store, path: str, batch: Sequence[_Job]) -> None:
    with naming_what_fails(store, path, batch[0].name):
        rest = [job for job in batch if job.target is None or not _copy_from_map(store, path, job)]
        if rest:
            _read(store, path, rest)


def _copy_from_map(store: Store, path: str, job: _Job) -> bool:
    """Copy a job that can't be read in place from a memory map of the file; returns whether that was possible."""
    assert job.target is not None
    if job.target.device.type != "cpu" or job.begin % job.dtype.itemsize:
        return False
    if job.end - job.begin < MAPPED_BYTES or (memory := store.mapped(path, job.begin, job.end)) is None:
        return False
    _check(job, memory, f"{store.root}/{path}")
    _copy_out(job, torch.frombuffer(memory, dtype=job.dtype))
    return True


def _copy_out(job: _Job, elements: Tensor) -> None:
    assert job.target is not None
    job.target.copy_(elements.as_strided(job.target.shape, job.strides, elements.storage_offset() + job.offset))


def _read(store: Store, path: str, jobs: Sequence[_Job]) -> None:
    places, total = [], 0
    for job in jobs:
        places.append(total)
        if job.into is None:
            total += -(-(job.end - job.begin) // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
    room = thread_memory(total, pinned="cuda" in {job.target.device.type for job in jobs if job.target is not None})
    memory = byte_view(room) if total else memoryview(b"")
    buffers = [
        memory[place : place + job.end - job.begin] if job.into is None else job.into
        for job, place in zip(jobs, places)
    ]
    with store.reading(path) as read:
        # in one call up to step_bytes, or a single longer job
        for group in groups(zip(jobs, buffers), lambda item: item[1].nbytes, store.step_bytes):
            _read_and_check(read, group, store.step_bytes, f"{store.root}/{path}")
    for job, place, buffer in zip(jobs, places, buffers):
        if job.target is not None:
            _copy_out(job, room[place : place + buffer.nbytes].view(job.dtype))


def _read_and_check(read: Reader, jobs: Sequence[tuple[_Job, Buffer]], step_bytes: int, file: str) -> None:
    """Read, and verify digests while the bytes are in the CPU cache."""
    if len(jobs) > 1 or jobs[0][1].nbytes <= step_bytes or not jobs[0][0].digests:
        read([(job.begin, buffer) for job, buffer in jobs])
        for job, buffer in jobs:
            _check(job, buffer, file)
        return
    job, buffer = jobs[0]
    blocks = read_blocks(read, job.begin, buffer, job.block_bytes, step_bytes)
    for number, (start, stop, found) in enumerate(blocks):
        expected = digest_at(job.digests, number)
        check_digest(found, expected, job.name, job.begin + start, job.begin + stop, file)


def _check(job: _Job, memory: Buffer, file: str) -> None:
    for number, start in enumerate(range(0, memory.nbytes, job.block_bytes) if job.digests else ()):
        block, at = memory[start : start + job.block_bytes], job.begin + start
        check_digest(digest_bytes(block), digest_at(job.digests, number), job.name, at, at + block.nbytes, file)


@lru_cache(maxsize=LAYOUTS_KEPT)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
