"""Asynchronous saving: the caller waits only until its tensors are copied; a background thread writes the copy.

The copy's memory is kept from save to save. At most one save is in progress: the next one waits for it, and raises its
error. The thread communicates over its own process group, so that its collectives never mix with those of training.

A save that the program neither waits for nor closes is finished before the interpreter exits. If it fails then, the
error is printed; only a program that waits has it raised.

Private part of Python 3.11 to 3.14: ``threading._register_atexit``, since thread pools, which stores use, accept no
work once ``atexit`` callbacks run.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.memory import byte_view, host_memory, is_plain, resolved, settle
from lightning_shard.checkpoint.optimizers.taken import take_apart
from lightning_shard.checkpoint.ranks import Ranks, all_or_none
from lightning_shard.checkpoint.saving.commit import new_attempt
from lightning_shard.checkpoint.saving.part import PartFile, RankPart, plan_part
from lightning_shard.checkpoint.saving.save import Order, SaveReport, Saving, plain
from lightning_shard.checkpoint.store import absolute
from lightning_shard.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIGNMENT_BYTES = 64


class AsyncSaver:
    """Saves as :func:`lightning_shard.checkpoint.save` does, but returns when the tensors have been copied.

    The constructor, :meth:`save` and :meth:`wait` are collective calls over the ranks that save. As a context manager
    it closes at the end of the block, and raises the error of the last save.

    Args:
        group: The ranks that save. Default: all.
        timeout: The timeout of the background thread's process group, which bounds the wait for a lost rank. Default:
            torch's.
    """

    def __init__(self, group: Any = None, *, timeout: timedelta | None = None) -> None:
        ranks = Ranks.of(group)
        self._own_group = None
        if not ranks.alone:
            self._own_group = dist.new_group(list(ranks.members), timeout=timeout, backend="gloo")
        self._ranks = Ranks.of(self._own_group) if self._own_group is not None else ranks
        self._copies = _Copies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-save")
        self._saving: Future[SaveReport] | None = None
        self._path = ""
        self._after: list[Future[None]] = []
        self._said = False
        self._closed = False

    def save(
        self,
        state: Mapping[str, Any] | torch.nn.Module,
        path: str | os.PathLike[str],
        *,
        optimizer: Any = None,
        trainer_state: Any = None,
        rank_state: Mapping[str, Tensor] | None = None,
        mesh: DeviceMesh | None = None,
        layout: Any = None,
        storage_options: dict[str, Any] | None = None,
        fsync: bool = True,
        digests: bool = True,
        own_disks: bool = False,
        afterwards: Callable[[Ranks], None] | None = None,
    ) -> None:
        """Copy the tensors, and write them in the background. Changes after this returns don't affect the save.

        Waits for the previous save, if it is still being written. See :func:`lightning_shard.checkpoint.save` for the
        other arguments.

        Args:
            afterwards: Called in the background thread on every rank once the checkpoint is committed, with the ranks,
                over which it may use collectives. It is part of the save: if it raises, the save has failed.

        Raises:
            UnsupportedStateError: As ``save``; nothing has been written.
            CheckpointError: The previous save failed, or the saver was closed.
        """
        if self._closed:
            raise CheckpointError(f"This AsyncSaver was closed, so {path} isn't saved: make another one.")
        waits = self._saving is not None and not self._saving.done()
        self._finish()
        ranks = self._ranks
        optimizer, trainer_state = take_apart(optimizer, state, trainer_state, mesh, ranks)
        with all_or_none(ranks.group):
            self.drain()
            if waits and ranks.first and not self._said:
                self._say_that_it_waits()
            order = Order(absolute(path), dict(storage_options or {}), plain(layout), fsync, digests, own_disks)
            what = state, optimizer, trainer_state, rank_state
            part = plan_part(*what, mesh=mesh, ranks=ranks, attempt=new_attempt())
            part.files = self._copies.of(part.files)
        self._path = os.fspath(order.path)
        self._saving = self._thread.submit(_write, order, ranks, part, afterwards)
        _unheard[self._saving] = self._path

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the background once the current save is committed, not if it fails. Not collective."""
        if self._closed:  # all saves have ended
            action()
            return
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._after.append(self._thread.submit(act))

    def done(self) -> bool:
        """Whether this rank has no save in progress, so that :meth:`save` and :meth:`wait` needn't wait for one."""
        return all(future.done() for future in self._under_way())

    def wait(self) -> SaveReport | None:
        """Wait until the save in progress is committed. A collective call.

        Returns:
            The save's report, as of :func:`lightning_shard.checkpoint.save`; None if no save was in progress.

        Raises:
            CheckpointError: The save failed, on every rank; an earlier checkpoint at its path is still there.
        """
        self._finish()  # before our own collectives, since the thread uses the same group
        with all_or_none(self._ranks.group):
            return self.drain()

    def drain(self) -> SaveReport | None:
        """:meth:`wait` for this rank alone, not collective: for a rank that ends with an error.

        Raises:
            CheckpointError: The save failed.
        """
        self._finish()
        saving, after = self._saving, self._after
        self._saving, self._after = None, []
        report = None
        if saving is not None:
            _unheard.pop(saving, None)
            report = saving.result()
        for future in after:
            future.result()
        return report

    def _finish(self) -> None:
        """Wait for the thread, keeping results. If interrupted, nothing changes: the thread still reads the copies."""
        futures.wait(self._under_way())

    def _under_way(self) -> list[Future[Any]]:
        return [future for future in (self._saving, *self._after) if future is not None]

    def close(self) -> None:
        """Drain, and free the memory and the process group."""
        self._closed = True
        try:
            self.drain()
        finally:
            self._thread.shutdown()
            self._copies = _Copies()
            if self._own_group is not None and dist.is_initialized():
                dist.destroy_process_group(self._own_group)
            self._own_group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"The save to {self._path} that was under way failed, too: {fault}")

    def _say_that_it_waits(self) -> None:
        self._said = True
        warnings.warn(
            f"The previous save, to {self._path}, was still being written, so the next one waited for it: saves are"
            " started faster than the store can write them. Save less often, or to a faster store. (Shown once.)",
            stacklevel=3,
        )


def _write(order: Order, ranks: Ranks, part: RankPart, afterwards: Callable[[Ranks], None] | None) -> SaveReport:
    report = Saving(order, ranks, lambda: part).run()
    if afterwards is not None:
        afterwards(ranks)
    return report


_unheard: dict[Future[SaveReport], str] = {}
"""Saves whose outcome nobody has asked for yet, with their paths."""
os.register_at_fork(after_in_child=_unheard.clear)  # a forked child lacks the threads that write them


@atexit.register
def _tell_at_exit() -> None:
    """Print failures that nobody has asked for."""
    for future, path in _unheard.items():
        if future.done() and (error := future.exception()):
            print(f"[lightning_shard] The save to {path} failed, and nobody waited for it: {error}", file=sys.stderr)


threading._register_atexit(lambda: futures.wait(list(_unheard)))  # type: ignore[attr-defined]


class _Copies:
    """Reused memory for copies of one rank's part of a checkpoint; grows to the largest part."""

    def __init__(self) -> None:
        self._memory = host_memory(0, pinned=False)
        self._pinned = False

    def of(self, files: list[PartFile]) -> list[PartFile]:
        """Copy the files' tensors; returns the files with the copies."""
        everything = [data for file in files for data in file.data]
        sizes = (-(-data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for data in everything)
        *starts, total = itertools.accumulate(sizes, initial=0)
        of_device = any(data.is_cuda for data in everything)
        if self._memory.numel() < total or (of_device and not self._pinned):
            self._memory = host_memory(0, pinned=False)  # free the old memory first
            self._memory, self._pinned = host_memory(total, pinned=of_device), of_device
        copies = (_copy(data, self._memory[at : at + data.nbytes]) for data, at in zip(everything, starts))
        copied = [replace(file, data=list(itertools.islice(copies, len(file.data)))) for file in files]
        settle(everything)  # wait for device copies: later changes of the tensors don't reach them
        return copied


def _copy(data: Tensor, memory: Tensor) -> Tensor:
    copy = memory.view(data.dtype).view(data.shape)
    if data.numel() == 0:
        return copy
    if is_plain(data):
        byte_view(memory)[:] = byte_view(data)  # a plain memcpy, about twice as fast as Tensor.copy_ of one thread
    else:
        copy.copy_(resolved(data), non_blocking=data.is_cuda)
    return copy
