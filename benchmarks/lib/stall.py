"""How long does an asynchronous save hold up training, and what memory does a save take?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.lib import saving
from benchmarks.lib.memory import growth_of
from benchmarks.lib.options import Options
from benchmarks.lib.report import MIB, Row, Target, compare
from benchmarks.lib.rounds import TIMEOUT_S, Contender, Task, Timed, count, everyone, fresh_folders, in_turn, quiet
from benchmarks.lib.state import State, gpt_shapes, rows
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

COPY = "memcpy of the same bytes"
OURS = "lightning_shard, asynchronous"
DCP = "torch DCP async_save"
SLOWDOWN = 1.1
SYNC_MIB = 64
"""Over the state; an asynchronous save may hold a copy of it besides."""


def measure(options: Options) -> Iterator[Row]:
    for ranks in options.ranks:
        timed, nbytes = run_ranks(_stalls, ranks, options, timeout_s=TIMEOUT_S)[0]
        targets = {OURS: Target("of_reference", 1 / SLOWDOWN, text=f"≤ {SLOWDOWN}× the time")}
        yield from compare(
            f"stall of a save, {count(ranks)}", nbytes, timed, reference=COPY, ours=OURS, targets=targets
        )


def _stalls(options: Options) -> tuple[Timed, int]:
    quiet()
    state = State.of(gpt_shapes(options.state_bytes), rows(dist.get_world_size()))
    # zeros, so that the memory has been touched; and not Tensor.copy_, which takes twice as long on one thread
    touched = {name: torch.zeros(tensor.shape) for name, tensor in state.local().items()}

    def copy(task: Task) -> None:
        for name, tensor in state.local().items():
            saving.memory(touched[name])[:] = saving.memory(tensor)

    saver = checkpoint.AsyncSaver()
    contenders: dict[str, Contender] = {COPY: copy, OURS: partial(_ours_async, saver), DCP: _dcp_async}
    with fresh_folders(f"{options.folder}/stall") as fresh:
        timed = in_turn(contenders, options.rounds, lambda name: Task(state, fresh()))
    saver.close()
    return timed, sum(everyone(state.local_bytes))


def _ours_async(saver: checkpoint.AsyncSaver, task: Task) -> None:
    saver.save(task.state.model, task.folder, optimizer=task.state.optimizer, fsync=False)
    task.afterwards.callback(saver.wait)


def _dcp_async(task: Task) -> None:
    writer = dcp.FileSystemWriter(task.folder, sync_files=False)
    saving_on: Any = dcp.async_save(task.state.tree, storage_writer=writer)
    task.afterwards.callback(saving_on.result)


# -- memory -----------------------------------------------------------------------------------------------------------


def measure_memory(options: Options) -> Iterator[Row]:
    ranks = max(options.ranks)
    what = f"memory of a save over the state, {count(ranks)}"
    for name, synchronous in ((saving.OURS, True), (OURS, False)):
        grown = run_ranks(_growth, ranks, options, synchronous, timeout_s=TIMEOUT_S)
        most, local = (max(numbers) / MIB for numbers in zip(*grown))
        target = Target("mib", SYNC_MIB if synchronous else round(local) + SYNC_MIB, most=True)
        yield Row(what, name, mib=most, target=target, note=f"{local:.0f} MiB of state per rank")


def _growth(options: Options, synchronous: bool) -> tuple[int, int]:
    """Of a second save, since a first one imports what it needs; in fresh processes, where nothing was freed before."""
    quiet()
    ranks = dist.get_world_size()
    state = State.of(gpt_shapes(options.state_bytes), rows(ranks))
    small = State.of(gpt_shapes(1), rows(ranks))
    saver = None if synchronous else checkpoint.AsyncSaver()

    def save(state: State, folder: str) -> None:
        task = Task(state, folder)
        with task.afterwards:
            saving.ours(task) if saver is None else _ours_async(saver, task)

    with fresh_folders(f"{options.folder}/memory") as fresh:
        save(small, fresh())
        folder = fresh()
        grown = growth_of(lambda: save(state, folder))
    if saver is not None:
        saver.close()
    return grown, state.local_bytes
