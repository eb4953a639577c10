"""How fast is a save: this package and others write a state to a local folder."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lib.options import Options
from benchmarks.lib.report import Row, Target, compare
from benchmarks.lib.rounds import (
    TIMEOUT_S,
    Contender,
    Task,
    Timed,
    count,
    everyone,
    fresh_folders,
    in_turn,
    quiet,
)
from benchmarks.lib.state import State, gpt_shapes, rows
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

RAW = "raw pwrite"
OURS = "lightning_shard"
OURS_WITHOUT_DIGESTS = "lightning_shard, no digests"
SAFETENSORS = "safetensors save_file per rank"
DCP = "torch DCP FileSystemWriter"
DCP_SAFETENSORS = "torch DCP HuggingFaceStorageWriter"
TORCH_CHECKPOINTING = "torch-checkpointing"
LIGHTNING = "Lightning ModelParallelStrategy"


def raw_pwrite(task: Task) -> None:
    descriptor = os.open(own_file(task), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        position = 0
        for tensor in task.state.local().values():
            view = memory(tensor)
            while view:
                written = os.pwrite(descriptor, view, position)
                position, view = position + written, view[written:]
    finally:
        os.close(descriptor)
    _sync_own_file(task)


def ours(task: Task, digests: bool = True) -> None:
    checkpoint.save(task.state.model, task.folder, optimizer=task.state.optimizer, fsync=task.fsync, digests=digests)


def safetensors(task: Task) -> None:
    save_file(task.state.local(), own_file(task))
    _sync_own_file(task)


def torch_dcp(task: Task) -> None:
    dcp.save(task.state.tree, storage_writer=dcp.FileSystemWriter(task.folder, sync_files=task.fsync))


def torch_dcp_safetensors(task: Task) -> None:
    writer = dcp.HuggingFaceStorageWriter(task.folder, save_distributed=True)
    writer.sync_files = task.fsync
    dcp.save(task.state.flat, storage_writer=writer)


def lightning(task: Task) -> None:
    """What a Trainer calls, with the state in the form that its strategy collects it in; without its fsync."""
    parts: dict[str, Any] = {"state_dict": task.state.model, "optimizer_states": [task.state.optimizer]}
    with mock.patch("os.fsync", return_value=None):
        _lightning_strategy().save_checkpoint(parts, task.folder)


def torch_checkpointing(task: Task) -> None:
    manager = torch_checkpointing_manager()
    manager.save(task.folder, task.state.tree)


CONTENDERS: dict[str, Contender] = {
    RAW: raw_pwrite,
    OURS: ours,
    OURS_WITHOUT_DIGESTS: functools.partial(ours, digests=False),
    SAFETENSORS: safetensors,
    DCP: torch_dcp,
    DCP_SAFETENSORS: torch_dcp_safetensors,
    TORCH_CHECKPOINTING: torch_checkpointing,
    LIGHTNING: lightning,
}


@functools.cache
def torch_checkpointing_manager() -> Any:
    """Synchronous and buffered, each rank for itself.

    As of 0.1.1 its resharder gathers over the ranks on CUDA only, and its unaligned direct writes fail on ext4.
    """
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()


@functools.cache
def _lightning_strategy() -> Any:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy()
    strategy.cluster_environment = TorchElasticEnvironment()
    return strategy


def own_file(task: Task) -> str:
    return f"{task.folder}/rank-{dist.get_rank()}.safetensors"


def memory(tensor: Tensor) -> memoryview:
    """A contiguous tensor's bytes."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _sync_own_file(task: Task) -> None:
    for path in (own_file(task), task.folder) if task.fsync else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# -- the question -----------------------------------------------------------------------------------------------------

SYNCED = (RAW, OURS, OURS_WITHOUT_DIGESTS, SAFETENSORS, DCP)
"""Those that heed ``Task.fsync``, and are measured with it too: there it is mostly the disk that is measured."""
OF_OTHERS = {DCP: Target("ours_is", 3)} | {
    name: Target("ours_is", 1) for name in (SAFETENSORS, DCP_SAFETENSORS, TORCH_CHECKPOINTING, LIGHTNING)
}


def measure(options: Options) -> Iterator[Row]:
    for ranks in options.ranks:
        for fsync in options.fsync:
            if fsync and ranks != max(options.ranks):
                continue
            timed, nbytes = run_ranks(_on_rank, ranks, options, fsync, timeout_s=TIMEOUT_S)[0]
            what = f"save, {count(ranks)}, {'with' if fsync else 'no'} fsync"
            least = 1.1 if ranks == 1 else 0.95 if fsync else 0.8
            targets = {OURS: Target("of_reference", least), **OF_OTHERS}
            yield from compare(what, nbytes, timed, reference=RAW, ours=OURS, targets=targets)


def _on_rank(options: Options, fsync: bool) -> tuple[Timed, int]:
    quiet()
    ranks = dist.get_world_size()
    state = State.of(gpt_shapes(options.state_bytes), rows(ranks))
    names = (RAW, OURS) if options.bare else SYNCED if fsync else CONTENDERS
    contenders = {name: CONTENDERS[name] for name in names}
    with fresh_folders(f"{options.folder}/save") as fresh:
        timed = in_turn(contenders, options.rounds, lambda name: Task(state, fresh(), fsync))
    return timed, sum(everyone(state.local_bytes))
