"""Files to a store, by one process or dealt over the ranks, in bounded memory.

On a local disk every rank writes its part of each file into its place; the files appear by a rename when all are whole.
On S3 every rank puts parts of a file, which appears when it is completed; where there are more files than ranks, and on
other stores, which take a file from front to back, each file is one rank's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.checkpoint.commit import Ranks, all_or_none
from lightning_shard.checkpoint.copy import Copier, pwrite
from lightning_shard.checkpoint.outfile import OutFile, Step, share_out, steps
from lightning_shard.checkpoint.store import Buffer, LocalStore, Store
from lightning_shard.checkpoint.store.local import thread_count
from lightning_shard.checkpoint.store.s3 import S3Store, Upload, part_bytes, split

MAX_THREADS = 4
COPY_BYTES, COPY_SLAB_BYTES = 32 * 2**20, 128 * 2**20
"""How much one thread copies at a time from local disk to local disk, through small buffers."""
BUFFER_BYTES = 16 * 2**20
"""How much is read at a time otherwise; as many such buffers as threads, and one more, are in memory."""

MIN_SHARE_BYTES = 32 * 2**20
"""A rank puts no less of a file that is put in parts; steps are shorter, so that no part is too short for S3."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def deliver(
    store: Store, files: Sequence[OutFile], ranks: Ranks, *, durable: bool, progress: Progress | None = None
) -> None:
    """Write files. A collective call over ``ranks``, all of which are given the same files.

    Raises:
        CorruptCheckpointError: On reading what they are made of; on every rank, and no local file appears then.
    """
    if isinstance(store, LocalStore):
        _deliver_locally(store, files, ranks, durable, progress)
        return
    together: list[_InParts] = []
    if isinstance(store, S3Store) and len(files) < len(ranks.members):
        together = [_InParts(file, len(ranks.members)) for file in files if file.size >= 2 * MIN_SHARE_BYTES]
    place = ranks.members.index(ranks.rank)
    shared = {of.file.name for of in together}
    mine = [file for file in files if file.name not in shared][place :: len(ranks.members)]
    count = _Count(sum(file.size for file in mine) + sum(of.lengths[place] for of in together), progress)
    for of in together:
        assert isinstance(store, S3Store)
        _deliver_in_parts(store, of, ranks, count)
    with all_or_none(ranks.group):
        for file in mine:
            store.publish(
                file.name, _stream(list(steps(file, BUFFER_BYTES, BUFFER_BYTES)), count), file.size, durable=durable
            )


@dataclass
class _Count:
    """The bytes done of ``total``, told to ``progress``."""

    total: int
    progress: Progress | None
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _deliver_locally(
    store: LocalStore, files: Sequence[OutFile], ranks: Ranks, durable: bool, progress: Progress | None
) -> None:
    paths = {file.name: os.path.join(store.root, file.name) for file in files}
    suffix = ranks.broadcast(f".{os.getpid()}-{secrets.token_hex(4)}.tmp" if ranks.first else None)
    try:
        with all_or_none(ranks.group):
            if ranks.first:
                for file in files:
                    _reserve(paths[file.name] + suffix, file.size)
        # a rank that doesn't see them is on another machine, with a disk of its own
        sees = all(os.path.exists(path + suffix) for path in paths.values())
        seeing = ranks.broadcast([rank for rank, can in zip(ranks.members, ranks.gather(sees)) if can])
        with all_or_none(ranks.group):
            if ranks.rank in seeing:
                work = _work(files)
                sizes = [step.nbytes for _, step in work]
                mine = share_out(work, sizes, len(seeing), seeing.index(ranks.rank))
                _write_in_place(
                    [(paths[file.name] + suffix, step) for file, step in mine],
                    _from_local_disk(files),
                    durable,
                    progress,
                )
        with all_or_none(ranks.group):
            if ranks.first:
                for path in paths.values():
                    os.replace(path + suffix, path)
                if durable:
                    store.sync(paths)
    finally:
        if ranks.first:
            for path in paths.values():
                with contextlib.suppress(OSError):
                    os.unlink(path + suffix)


class _InParts:
    """A file that several ranks put together.

    Attributes:
        work: What each of all ranks reads and puts, in the file's order; nothing for those that would have too little.
        lengths: The same in bytes.
        parts: And the sizes of the parts.
    """

    def __init__(self, file: OutFile, ranks: int) -> None:
        self.file = file
        all_steps = list(steps(file, BUFFER_BYTES, BUFFER_BYTES))
        sizes = [step.nbytes for step in all_steps]
        count = max(1, min(ranks, file.size // MIN_SHARE_BYTES))
        work = [share_out(all_steps, sizes, count, index) for index in range(count)]
        self.work = [*work, *([] for _ in range(ranks - count))]
        self.lengths = [sum(step.nbytes for step in of_rank) for of_rank in self.work]
        self.parts = [split(length, part_bytes(file.size)) if length else [] for length in self.lengths]


def _deliver_in_parts(store: S3Store, of: _InParts, ranks: Ranks, count: _Count) -> None:
    upload: Upload | None = None
    try:
        with all_or_none(ranks.group):
            if ranks.first:
                upload = store.begin_upload(of.file.name)
        upload = ranks.broadcast(upload)
        assert upload is not None
        tags: list[str] = []
        with all_or_none(ranks.group):
            place = ranks.members.index(ranks.rank)
            first = 1 + sum(map(len, of.parts[:place]))
            tags += store.upload_parts(upload, _stream(of.work[place], count), of.parts[place], first=first)
        everyone = ranks.gather(tags)
        with all_or_none(ranks.group):
            if ranks.first:
                store.complete_upload(upload, [tag for of_rank in everyone for tag in of_rank], of.file.size)
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


def _work(files: Sequence[OutFile]) -> list[tuple[OutFile, Step]]:
    sizes = (COPY_BYTES, COPY_SLAB_BYTES) if _from_local_disk(files) else (BUFFER_BYTES, BUFFER_BYTES)
    return [(file, step) for file in files for step in steps(file, *sizes)]


def _from_local_disk(files: Sequence[OutFile]) -> bool:
    stores = (source.stored.checkpoint.store for file in files for _, source in file.tensors)
    return isinstance(next(stores, None), LocalStore)


def _write_in_place(work: Sequence[tuple[str, Step]], copies: bool, durable: bool, progress: Progress | None) -> None:
    count = _Count(sum(step.nbytes for _, step in work), progress)
    fds: dict[str, int] = {}
    local = threading.local()

    def copy(path: str, step: Step) -> int:
        if not hasattr(local, "copier"):
            local.copier = Copier()
        local.copier.copy(step, fds[path])
        return step.nbytes

    def fill(path: str, step: Step) -> int:
        if not hasattr(local, "buffer") or local.buffer.numel() < step.nbytes:
            local.buffer = torch.empty(step.nbytes, dtype=torch.uint8)
        pwrite(fds[path], step.fill(local.buffer), step.begin)
        return step.nbytes

    try:
        for path in dict.fromkeys(path for path, _ in work):
            fds[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with _pool() as pool:
            for nbytes in pool.map(copy if copies else fill, *zip(*work)) if work else ():
                count.add(nbytes)
        if durable:
            for fd in fds.values():
                os.fsync(fd)
    finally:
        for fd in fds.values():
            os.close(fd)


def _stream(work: Sequence[Step], count: _Count) -> Iterator[Buffer]:
    """The steps' bytes in order; the next few are read while one is written."""
    waiting: deque[tuple[Future[memoryview], Tensor]] = deque()
    size = max((step.nbytes for step in work), default=0)
    free = [torch.empty(size, dtype=torch.uint8) for _ in range(_threads() + 1)]
    with _pool() as pool:
        coming = iter(work)
        while True:
            while free and (step := next(coming, None)) is not None:
                buffer = free.pop()
                waiting.append((pool.submit(step.fill, buffer), buffer))
            if not waiting:
                return
            future, buffer = waiting.popleft()
            data = future.result()
            yield data
            count.add(data.nbytes)
            free.append(buffer)


def _threads() -> int:
    return min(thread_count(), MAX_THREADS)


@contextlib.contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(_threads(), thread_name_prefix="checkpoint-gather")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
