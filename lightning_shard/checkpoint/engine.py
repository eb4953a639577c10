"""The byte engine: work on this rank's share of the processors, and bytes hashed while they are in a core's cache.

Who uses it, and why two threads write two files rather than one: ``docs/decisions/engine.md``.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
import xxhash
from torch import Tensor

from lightning_shard import processors
from lightning_shard.checkpoint.format.blocks import digest_bytes
from lightning_shard.checkpoint.store import Buffer, Reader

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_FILES = 2
"""Files that a rank writes at a time; in addition to the sizes of these, an upload's buffers bound its memory."""


def files_at_once(*, of_device: bool = False) -> int:
    """How many files this rank writes at a time: from a device one is copied while another is hashed and written."""
    return min(max(processors.share(), 1 + of_device), MOST_FILES)


def each(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int, *, stop: threading.Event | None = None
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, ``function(item)``) in order, computed by up to ``threads`` threads; by this one if that is 1.

    Items are taken up to ``2 * threads`` ahead, so there may be millions. After an error, or if the caller stops, no
    further item is begun, and those under way are waited for. ``stop`` is set at once, and the first error is raised.
    """
    if threads <= 1:
        for item in items:
            yield item, function(item)
        return
    running: deque[tuple[Item, Future[Result]]] = deque()
    errors: list[BaseException] = []

    def run(item: Item) -> Result:
        if errors:
            raise InterruptedError  # never seen: that of the error's item, which is an earlier one, is
        try:
            return function(item)
        except BaseException as error:
            errors.append(error)
            if stop is not None:
                stop.set()
            raise

    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoint") as pool:
        try:
            for item in items:
                running.append((item, pool.submit(run, item)))
                if len(running) >= 2 * threads:
                    done, future = running.popleft()
                    yield done, future.result()
            while running:
                done, future = running.popleft()
                yield done, future.result()
        except BaseException as error:
            if stop is not None:
                stop.set()
                if error in errors:  # that of an earlier item may only say that it was stopped
                    raise errors[0] from None
            raise
        finally:
            for _, future in running:
                future.cancel()


def groups(items: Iterable[Item], nbytes: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items in groups of up to ``most`` bytes, or of a single larger item."""
    group: list[Item] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


class Digests:
    """The digests of a chunk's blocks, from bytes that come in order, in parts of any size.

    Args:
        block_bytes: The size of a block; the last may be shorter.
        found: Called with each block's digest as soon as it is known.
    """

    def __init__(self, block_bytes: int, found: Callable[[bytes], None]) -> None:
        self._block_bytes, self._found = block_bytes, found
        self._hasher, self._left = xxhash.xxh3_128(), block_bytes

    def update(self, data: Buffer) -> None:
        while data.nbytes:
            part = data[: self._left]
            self._hasher.update(part)
            self._left -= part.nbytes
            if not self._left:
                self.end()
            data = data[part.nbytes :]

    def end(self) -> None:
        """End the block, if any of it has come."""
        if self._left < self._block_bytes:
            self._found(self._hasher.digest())
            self._hasher.reset()
            self._left = self._block_bytes


def read_blocks(
    read: Reader, at: int, memory: Buffer, block_bytes: int, step_bytes: int
) -> Iterator[tuple[int, int, bytes]]:
    """Fill ``memory`` from byte ``at`` of a file, in reads of about ``step_bytes``; yield each block's begin and end in
    ``memory`` and its digest."""
    for begin in range(0, memory.nbytes, block := max(block_bytes, step_bytes - step_bytes % block_bytes)):
        stretch = memory[begin : begin + block]
        if step_bytes >= stretch.nbytes:
            read([(at + begin, stretch)])
            for start in range(0, stretch.nbytes, block_bytes):
                data = stretch[start : start + block_bytes]
                yield begin + start, begin + start + data.nbytes, digest_bytes(data)
            continue
        hasher = xxhash.xxh3_128()
        for start in range(0, stretch.nbytes, step_bytes):
            step = stretch[start : start + step_bytes]
            read([(at + begin + start, step)])
            hasher.update(step)
        yield begin, begin + stretch.nbytes, hasher.digest()


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Context and decorator: pause Python's collector of cycles. A plan makes a few objects for each tensor, and for
    every so many new ones the collector goes through all objects of the program: most of the time of a plan."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_of_thread = threading.local()


def thread_memory(nbytes: int, *, pinned: bool = False) -> Tensor:
    """Memory of this thread as a uint8 tensor, valid until the thread asks again. It grows to the largest request."""
    known: Tensor | None = getattr(_of_thread, "memory", None)
    if known is None or known.numel() < nbytes or (pinned and not known.is_pinned()):
        known = _of_thread.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return known[:nbytes]
