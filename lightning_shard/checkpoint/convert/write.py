"""Writes planned files to a store, by one process or divided among the ranks, in bounded memory.

On a local disk every rank writes its part of each file in place; the files appear by a rename when all are complete. On
S3 the ranks put parts of a multipart upload, and the file appears when it is completed. Where there are as many files
as ranks, and on other stores, which need a file to be streamed, one rank writes each file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.checkpoint.convert.outfile import Copier, OutFile, Step, share_out, steps
from lightning_shard.checkpoint.engine import each
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.store import Buffer, Store, Upload, Uploads
from lightning_shard.checkpoint.store.local import pwrite, thread_count

MAX_THREADS = 4
COPY_BYTES, COPY_SLAB_BYTES = 32 * 2**20, 128 * 2**20
"""Step and slab size of one thread that copies from local disk to local disk, through small buffers."""
BUFFER_BYTES = 16 * 2**20
"""Step size otherwise; two such buffers per thread, and one more, are in memory."""
MIN_SHARED_BYTES = 64 * 2**20
"""One rank puts a shorter file."""
Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


def deliver(
    store: Store,
    files: Sequence[OutFile],
    ranks: Ranks,
    *,
    durable: bool,
    progress: Progress | None = None,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Write files. A collective call over ``ranks``, all of which pass the same files.

    Args:
        begin: Called on the first rank before the first file appears.

    Raises:
        CorruptCheckpointError: A source is damaged. Every rank raises, and no local file appears.
    """
    if store.folder is not None:
        _deliver_locally(store, store.folder, files, ranks, durable, progress, begin)
        return
    with all_or_none(ranks.group):
        if ranks.first:
            begin()
    uploads = store.uploads if len(files) < len(ranks.members) else None
    large = [file for file in files if uploads is not None and file.size >= MIN_SHARED_BYTES]
    shared = [_OwnParts(file, ranks, uploads) for file in large if uploads is not None]
    whole = [file for file in files if not shared or file.size < MIN_SHARED_BYTES]
    mine = whole[ranks.members.index(ranks.rank) :: len(ranks.members)]
    count = _Count(sum(file.size for file in mine) + sum(own.end - own.begin for own in shared), progress)
    for own in shared:
        _deliver_in_parts(own, ranks, count)
    with all_or_none(ranks.group):
        for file in mine:
            store.publish(file.name, _stream(file, 0, file.size, count), file.size, durable=durable)


@dataclass
class _Count:
    """Counts the bytes done of ``total``, and reports them to ``progress``."""

    total: int
    progress: Progress | None
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.total = max(self.total, self.done)  # a share has whole steps: a little more or less than planned
        if self.progress is not None:
            self.progress(self.done, self.total)

    def end(self) -> None:
        if self.done < self.total and self.progress is not None:
            self.progress(self.done, self.done)


def _deliver_locally(
    store: Store,
    folder: str,
    files: Sequence[OutFile],
    ranks: Ranks,
    durable: bool,
    progress: Progress | None,
    begin: Callable[[], None],
) -> None:
    paths = {file.name: os.path.join(folder, file.name) for file in files}
    suffix = ranks.broadcast(f".{os.getpid()}-{secrets.token_hex(4)}.tmp" if ranks.first else None)
    try:
        with all_or_none(ranks.group):
            if ranks.first:
                for file in files:
                    _reserve(paths[file.name] + suffix, file.size)
        # a rank that doesn't see the files is on another machine, with its own disk
        sees = all(os.path.exists(path + suffix) for path in paths.values())
        seeing = ranks.broadcast([rank for rank, can in zip(ranks.members, ranks.gather(sees)) if can])
        with all_or_none(ranks.group):
            if ranks.rank in seeing:
                total, place = sum(file.size for file in files), seeing.index(ranks.rank)
                share = total * place // len(seeing), total * (place + 1) // len(seeing)
                mine = share_out(_work(files), *share)
                _write_in_place(
                    ((paths[file.name] + suffix, step) for file, step in mine),
                    _from_local_disk(files),
                    durable,
                    _Count(share[1] - share[0], progress),
                )
        with all_or_none(ranks.group):
            if ranks.first:
                begin()
                for path in paths.values():
                    os.replace(path + suffix, path)
                if durable:
                    store.sync(paths)
    finally:
        if ranks.first:
            for path in paths.values():
                with contextlib.suppress(OSError):
                    os.unlink(path + suffix)


class _OwnParts:
    """This rank's bytes, ``begin`` to ``end``, of a file that all ranks upload together: whole parts of the upload."""

    def __init__(self, file: OutFile, ranks: Ranks, uploads: Uploads) -> None:
        self.file, self.uploads = file, uploads
        self.part_bytes = uploads.part_bytes(file.size)
        parts = -(-file.size // self.part_bytes)
        place, count = ranks.members.index(ranks.rank), len(ranks.members)
        self.first = parts * place // count
        self.begin = self.first * self.part_bytes
        self.end = min(parts * (place + 1) // count * self.part_bytes, file.size)


def _deliver_in_parts(own: _OwnParts, ranks: Ranks, count: _Count) -> None:
    store = own.uploads
    upload: Upload | None = None
    try:
        with all_or_none(ranks.group):
            if ranks.first:
                upload = store.begin_upload(own.file.name)
        upload = ranks.broadcast(upload)
        assert upload is not None
        tags: list[str] = []
        with all_or_none(ranks.group):
            if own.begin < own.end:
                data = _stream(own.file, own.begin, own.end, count)
                tags += store.upload_parts(upload, data, own.end - own.begin, own.part_bytes, first=own.first + 1)
        everyone = ranks.gather(tags)
        with all_or_none(ranks.group):
            if ranks.first:
                store.complete_upload(upload, [tag for of_rank in everyone for tag in of_rank], own.file.size)
    except BaseException:
        if ranks.first and upload is not None:
            store.abort_upload(upload)
        raise


def _reserve(path: str, size: int) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _work(files: Sequence[OutFile]) -> Iterator[tuple[OutFile, Step]]:
    """Generate all steps lazily: files of a large run have hundreds of thousands."""
    sizes = (COPY_BYTES, COPY_SLAB_BYTES) if _from_local_disk(files) else (BUFFER_BYTES, BUFFER_BYTES)
    return ((file, step) for file in files for step in steps(file, *sizes))


def _from_local_disk(files: Sequence[OutFile]) -> bool:
    stores = {id(c := source.stored.checkpoint): c.store for file in files for _, source in file.tensors}
    return bool(stores) and all(store.folder is not None for store in stores.values())


def _write_in_place(work: Iterable[tuple[str, Step]], copies: bool, durable: bool, count: _Count) -> None:
    fds: dict[str, int] = {}
    local = threading.local()

    def opened() -> Iterator[tuple[str, Step]]:
        for path, step in work:
            if path not in fds:
                fds[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            yield path, step

    def copy(item: tuple[str, Step]) -> int:
        path, step = item
        if not hasattr(local, "copier"):
            local.copier = Copier()
        local.copier.copy(step, fds[path])
        return step.nbytes

    def fill(item: tuple[str, Step]) -> int:
        path, step = item
        if not hasattr(local, "buffer") or local.buffer.numel() < step.nbytes:
            local.buffer = torch.empty(step.nbytes, dtype=torch.uint8)
        pwrite(fds[path], step.fill(local.buffer), step.begin)
        return step.nbytes

    try:
        for _, nbytes in each(copy if copies else fill, opened(), _threads()):
            count.add(nbytes)
        count.end()
        if durable:
            for fd in fds.values():
                os.fsync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)


def _stream(file: OutFile, begin: int, end: int, count: _Count) -> Iterator[Buffer]:
    """Yield a file's bytes from ``begin`` to ``end`` in order; reads ahead while the consumer writes."""
    free: list[Tensor] = []

    def fill(step: Step) -> tuple[Tensor, memoryview]:
        try:
            buffer = free.pop()
        except IndexError:
            buffer = torch.empty(min(BUFFER_BYTES, file.size), dtype=torch.uint8)
        # two ranks read a step that crosses the boundary of what they put
        return buffer, step.fill(buffer)[max(begin - step.begin, 0) : end - step.begin]

    before_end = itertools.takewhile(lambda step: step.begin < end, steps(file, BUFFER_BYTES, BUFFER_BYTES))
    own = (step for step in before_end if begin < step.begin + step.nbytes)
    for _, (buffer, data) in each(fill, own, max(_threads(), 2)):  # by this thread alone nothing would be read ahead
        yield data
        count.add(data.nbytes)
        free.append(buffer)


def _threads() -> int:
    return min(thread_count(), MAX_THREADS)
