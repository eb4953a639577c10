"""Saving while training goes on: the caller waits for a copy of its tensors, a thread writes it.

The copy lies in memory that is kept from save to save. At most one save is under way: the next one waits for it, and
raises what went wrong with it. The thread talks to the other ranks over a process group of its own, so that it never
gets between the collectives of the training.

What a program neither waits for nor closes is finished before the interpreter exits; if it fails then, that is printed,
and the exit status is 1.

Private parts of Python 3.11 to 3.14 used: ``threading._register_atexit``, since thread pools, which stores use, take no
more work once ``atexit`` is reached.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
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
from lightning_shard.checkpoint.saving.save import Order, SaveReport, plain, write_together
from lightning_shard.checkpoint.store import absolute

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIGNMENT_BYTES = 64


class AsyncSaver:
    """Saves as :func:`lightning_shard.checkpoint.save` does, but returns when the tensors have been copied.

    Making one is a collective call over the ranks that will save; so are :meth:`save` and :meth:`wait`. As a context
    manager it is closed at the end of the block, which raises what went wrong with the last save.

    Args:
        group: The ranks that save. Default: all.
        timeout: Of the background's process group: so long ranks wait for one that is lost. Default: torch's.
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
        afterwards: Callable[[Ranks], None] | None = None,
    ) -> None:
        """Copy the tensors, and write them in the background; what is changed after this returns isn't saved.

        Waits for the last save, if it is still being written. See :func:`lightning_shard.checkpoint.save` for the
        other arguments.

        Args:
            afterwards: Called in the background on every rank when the checkpoint is committed, with the ranks, which
                it may talk to. It belongs to the save, which fails if it does.

        Raises:
            UnsupportedStateError: As ``save``: nothing has been written then.
            CheckpointError: The last save failed.
        """
        waits = self._saving is not None and not self._saving.done()
        self._finish()
        ranks = self._ranks
        optimizer, trainer_state = take_apart(optimizer, state, trainer_state, mesh, ranks)
        with all_or_none(ranks.group):
            self.drain()
            if waits and ranks.first:
                self._say_that_it_waits()
            order = Order(absolute(path), dict(storage_options or {}), plain(layout), fsync, digests)
            part = plan_part(
                state,
                optimizer=optimizer,
                trainer_state=trainer_state,
                rank_state=rank_state,
                mesh=mesh,
                ranks=ranks,
                attempt=new_attempt(),
            )
            part.files = self._copies.of(part.files)
        self._path = order.path
        self._saving = self._thread.submit(_write, order, ranks, part, afterwards)
        _unheard[self._saving] = order.path

    def then(self, action: Callable[[], None]) -> None:
        """Do something when the save that is under way has been committed; not at all if it fails. Not collective."""
        saving = self._saving

        def act() -> None:
            if saving is None or saving.exception() is None:
                action()

        self._after.append(self._thread.submit(act))

    def done(self) -> bool:
        """Whether nothing is under way on this rank: then :meth:`save` and :meth:`wait` find their answer at once."""
        return all(future.done() for future in self._under_way())

    def wait(self) -> SaveReport | None:
        """Until the save that is under way is committed; a collective call.

        Returns:
            What :func:`lightning_shard.checkpoint.save` does; None where none was under way.

        Raises:
            CheckpointError: It failed, on every rank; the checkpoint that was at its path before is still there.
        """
        self._finish()  # before talking, which the thread does on the same group
        with all_or_none(self._ranks.group):
            return self.drain()

    def drain(self) -> SaveReport | None:
        """The same for this rank alone: for one that ends by an error, and can't count on the others.

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
        """Wait, and keep what came of it. Interrupted, it leaves all as it is: the thread still reads the copies."""
        futures.wait(self._under_way())

    def _under_way(self) -> list[Future[Any]]:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except Exception as fault:
            if error is None:
                raise
            error.add_note(f"The save to {self._path} that was under way failed, too: {fault}")

    def __del__(self) -> None:
        if getattr(self, "_saving", None) is not None:
            warnings.warn(
                f"An AsyncSaver was dropped with a save to {self._path} that nobody has waited for: use it in a with"
                " block, or call wait() or close(). What goes wrong is told when the program ends.",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _say_that_it_waits(self) -> None:
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"The save to {self._path} was still being written: the next one waited for it. Saves follow on one another"
            " faster than the store takes them. (This is said once.)",
            stacklevel=3,
        )


def _write(order: Order, ranks: Ranks, part: RankPart, afterwards: Callable[[Ranks], None] | None) -> SaveReport:
    report = write_together(order, ranks, lambda: part)
    if afterwards is not None:
        afterwards(ranks)
    return report


_unheard: dict[Future[SaveReport], str] = {}
"""Saves whose outcome nobody has been told, with their paths."""
os.register_at_fork(after_in_child=_unheard.clear)  # a child has not the threads that write them


def _finish_before_exit() -> None:
    futures.wait(list(_unheard))


@atexit.register
def _tell_at_exit() -> None:
    """Failures that nobody has heard of end the program with status 1, unless an error ends it anyway."""
    failed = [(path, error) for future, path in _unheard.items() if future.done() and (error := future.exception())]
    for path, error in failed:
        print(f"[lightning_shard] The save to {path} failed, and nobody waited for it: {error}", file=sys.stderr)
    if not failed or getattr(sys, "last_value", None) is not None:
        return
    # Python has no other way to set the status now. What is registered before this module was imported isn't run.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


threading._register_atexit(_finish_before_exit)  # type: ignore[attr-defined]


class _Copies:
    """Memory for one rank's part of a checkpoint, which grows to the largest and is used again."""

    def __init__(self) -> None:
        self._memory = host_memory(0, pinned=False)
        self._pinned = False

    def of(self, files: Iterable[PartFile]) -> list[PartFile]:
        """The same files with copies of the tensors."""
        files = list(files)
        everything = [data for file in files for data in file.data]
        starts, total = [], 0
        for data in everything:
            starts.append(total)
            total += -(-data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        of_device = any(data.is_cuda for data in everything)
        if self._memory.numel() < total or (of_device and not self._pinned):
            self._memory = host_memory(0, pinned=False)  # free it before there is more
            self._memory, self._pinned = host_memory(total, pinned=of_device), of_device
        places = iter(starts)
        copies = [replace(file, data=[self._copied(data, next(places)) for data in file.data]) for file in files]
        settle(everything)  # the copies are launched: what is done to the tensors after this doesn't reach them
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
        copy.copy_(resolved(data), non_blocking=data.is_cuda)
    return copy
