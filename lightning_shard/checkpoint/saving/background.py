"""Saving while training goes on: the caller waits for a copy of its tensors, a thread writes it.

The copy lies in memory that is kept from save to save. At most one save is under way: the next one waits for it, and
raises what went wrong with it. The thread talks to the other ranks over a process group of its own, so that it never
gets between the collectives of the training.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.memory import byte_view, is_plain
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.saving.commit import new_attempt
from lightning_shard.checkpoint.saving.part import PartFile, RankPart, plan_part
from lightning_shard.checkpoint.saving.save import Order, write_together

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIGNMENT_BYTES = 64


class AsyncSaver:
    """Saves as :func:`lightning_shard.checkpoint.save` does, but returns when the tensors have been copied.

    Making one is a collective call over the ranks that will save; so are :meth:`save` and :meth:`wait`.

    Args:
        group: The ranks that save. Default: all.
        timeout: Of what they do together. Default: torch's own.
    """

    def __init__(self, group: Any = None, *, timeout: timedelta | None = None) -> None:
        ranks = Ranks.of(group)
        self._own_group = None if ranks.alone else dist.new_group(list(ranks.members), timeout=timeout, backend="gloo")
        self._ranks = Ranks.of(self._own_group) if self._own_group is not None else ranks
        # each save's attempt follows from this, so that the ranks needn't talk of it
        self._seed = self._ranks.broadcast(new_attempt() if self._ranks.first else None)
        self._saves = 0
        self._copies = _Copies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._saving: Future[None] | None = None
        self._path: str | os.PathLike[str] = ""
        self._after: list[Future[None]] = []
        self._said = False

    def save(
        self,
        state: Mapping[str, Any] | torch.nn.Module,
        path: str | os.PathLike[str],
        *,
        optimizer: Mapping[str, Any] | None = None,
        trainer_state: Any = None,
        rank_state: Mapping[str, Tensor] | None = None,
        mesh: DeviceMesh | None = None,
        layout: Any = None,
        storage_options: dict[str, Any] | None = None,
        fsync: bool = True,
        digests: bool = True,
    ) -> None:
        """Copy the tensors, and write them in the background; what is changed after this returns isn't saved.

        Waits for the last save, if it is still being written. See :func:`lightning_shard.checkpoint.save` for the
        arguments.

        Raises:
            UnsupportedStateError: As ``save``: nothing has been written then.
            CheckpointError: The last save failed.
        """
        self._say_if_waiting()
        self._finish()
        ranks = self._ranks
        self._saves += 1
        with all_or_none(ranks.group):
            self.drain()
            part = plan_part(
                state,
                optimizer=optimizer,
                trainer_state=trainer_state,
                rank_state=rank_state,
                mesh=mesh,
                ranks=ranks,
                attempt=digest(f"{self._seed} {self._saves}".encode())[: len(self._seed)],
            )
            part.files = self._copies.of(part.files)
        self._path = path
        order = Order(path, storage_options, layout, fsync, digests)
        self._saving = self._thread.submit(_write, order, ranks, part)

    def then(self, action: Callable[[], None]) -> None:
        """Do something when the save that is under way has been committed; not at all if it fails. Not collective."""
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._after.append(self._thread.submit(act))

    def wait(self) -> None:
        """Until the save that is under way is committed; a collective call.

        Raises:
            CheckpointError: It failed, on every rank; the checkpoint that was at its path before is still there.
        """
        self._finish()  # before talking, which the thread does on the same group
        with all_or_none(self._ranks.group):
            self.drain()

    def drain(self) -> None:
        """The same for this rank alone: for one that ends by an error, and can't count on the others.

        Raises:
            CheckpointError: The save failed.
        """
        self._finish()
        under_way = self._under_way()
        self._saving, self._after = None, []
        for future in under_way:
            future.result()

    def _finish(self) -> None:
        """Wait, and keep what came of it. Interrupted, it leaves all as it is: the thread still reads the copies."""
        futures.wait(self._under_way())

    def _under_way(self) -> list[Future[None]]:
        return [future for future in (self._saving, *self._after) if future is not None]

    def close(self) -> None:
        """Drain, and free the memory and the process group."""
        try:
            self.drain()
        finally:
            self._thread.shutdown()
            self._copies = _Copies()
            if self._own_group is not None and dist.is_initialized():
                dist.destroy_process_group(self._own_group)
            self._own_group = None

    def _say_if_waiting(self) -> None:
        if self._said or self._saving is None or self._saving.done() or not self._ranks.first:
            return
        self._said = True
        warnings.warn(
            f"The save to {os.fspath(self._path)} is still being written: the next one waits for it. Saves follow on"
            " one another faster than the store takes them. (This is said once.)",
            stacklevel=3,
        )


def _write(order: Order, ranks: Ranks, part: RankPart) -> None:
    write_together(order, ranks, lambda: part)


class _Copies:
    """Memory for one rank's part of a checkpoint, which grows to the largest and is used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, files: Iterable[PartFile]) -> list[PartFile]:
        """The same files with copies of the tensors."""
        files = list(files)
        everything = [data for file in files for data in file.data]
        starts, total = [], 0
        for data in everything:
            starts.append(total)
            total += -(-data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        devices = {data.device for data in everything if data.device.type == "cuda"}
        if self._memory.numel() < total or (devices and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it before there is more
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=bool(devices))
        places = iter(starts)
        copies = [replace(file, data=[self._copied(data, next(places)) for data in file.data]) for file in files]
        for device in devices:
            torch.cuda.synchronize(device)
        return copies

    def _copied(self, data: Tensor, start: int) -> Tensor:
        return _copy(data, self._memory[start : start + data.nbytes])


def _copy(data: Tensor, memory: Tensor) -> Tensor:
    copy = memory.view(data.dtype).view(data.shape)
    if data.numel() == 0:
        return copy
    if is_plain(data):
        byte_view(memory)[:] = byte_view(data)  # a plain memcpy, about twice as fast as Tensor.copy_ of one thread
    else:
        copy.copy_(data, non_blocking=True)
    return copy
