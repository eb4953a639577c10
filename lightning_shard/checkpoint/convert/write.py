"""Writes planned files to a store, each by one rank, which streams it in bounded memory and reads ahead of the writing.

A file appears when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_shard.checkpoint.convert.outfile import OutFile, Step, steps
from lightning_shard.checkpoint.engine import each
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.store import Buffer, Store
from lightning_shard.checkpoint.store.local import thread_count
from lightning_shard.errors import CheckpointError

MAX_THREADS = 4
STEP_BYTES, SLAB_BYTES = 8 * 2**20, 32 * 2**20
"""Sizes of a step, see :func:`steps`; two such buffers per thread, and one more, are in memory."""
Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


def deliver(
    store: Store, files: Sequence[OutFile], ranks: Ranks, *, durable: bool, progress: Progress | None = None
) -> None:
    """Write files. A collective call over ``ranks``, all of which pass the same files."""
    mine = files[ranks.members.index(ranks.rank) :: len(ranks.members)]
    total, done = sum(file.size for file in mine), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with all_or_none(ranks.group):
        for file in mine:
            store.publish(file.name, _stream(file, count), file.size, durable=durable)
        if durable:
            store.sync([file.name for file in mine])
    with all_or_none(ranks.group):
        for file in files if ranks.first and store.folder is not None else ():
            if not store.exists(file.name):
                raise CheckpointError(
                    f"{store.root}/{file.name} isn't there, which another rank has just written: it is a disk of each"
                    " machine's own. Gather on one process, or to a place that all machines see."
                )


def _stream(file: OutFile, count: Callable[[int], None]) -> Iterator[Buffer]:
    """Yield a file's bytes in order; reads ahead while the consumer writes."""
    free: list[Tensor] = []

    def fill(step: Step) -> tuple[Tensor, memoryview]:
        try:
            buffer = free.pop()
        except IndexError:
            buffer = torch.empty(min(STEP_BYTES, file.size), dtype=torch.uint8)
        if buffer.numel() < step.nbytes:
            buffer = torch.empty(step.nbytes, dtype=torch.uint8)
        return buffer, step.fill(buffer)

    threads = max(min(thread_count(), MAX_THREADS), 2)  # by this thread alone nothing would be read ahead
    for _, (buffer, data) in each(fill, steps(file, STEP_BYTES, SLAB_BYTES), threads):
        yield data
        count(data.nbytes)
        free.append(buffer)
