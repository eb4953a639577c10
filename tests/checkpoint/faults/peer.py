"""torch.distributed.checkpoint by its defaults: the same faults are tried on it as on ours."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.faults.saves import Place, System, model, optimizer, same, sharded, whole_state

NAME = "torch.distributed.checkpoint"

logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


def save(place: Place, step: int, *, asynchronous: bool = False, fsync: bool = True, threads: int = 1) -> None:
    """Save a step's state; on several ranks, each its part. Collective."""
    state = whole_state(step)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state["model"]["w"] = sharded(state["model"]["w"], mesh)
    writer = dcp.FileSystemWriter(place.path, sync_files=fsync, thread_count=threads, overwrite=True)
    assert not asynchronous
    dcp.save(state, storage_writer=writer)


def step_at(path: str, options: dict[str, Any] | None = None) -> int | None:
    """Which step's checkpoint is whole at a path; None where there is none.

    Raises:
        Exception: There is one, and it can't be loaded.
        WrongValues: It was loaded, and is no step's.
    """
    if not Path(path, ".metadata").exists():
        return None
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    size = getattr(metadata.get("trainer.history"), "size", (0,))
    found: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in model(0).items()},
        "optimizer": {name: torch.zeros_like(tensor) for name, tensor in optimizer(0).items()},
        "trainer": {"global_step": 0, "history": torch.zeros(size, dtype=torch.int64)},
    }
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    step = found["trainer"]["global_step"]
    for section, wanted in whole_state(step).items():
        for name, value in wanted.items():
            same(name, found[section][name], value)
    return step


# its own exception is none of Exception's
PEER = System(save, step_at, (Exception, CheckpointException))
