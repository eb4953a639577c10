"""Ranks of tests on CUDA devices, over NCCL.

``TESTS_ON_GPU=1 pytest tests/training/whole/test_parity.py`` has Trainers of rank tests take CUDA devices, not the CPU.

Where there are fewer devices than ranks, all ranks share the first one. NCCL allows that from 2.31 on, with
``NCCL_MULTI_RANK_GPU_ENABLE=1``; an older torch is given a newer NCCL by ``LD_PRELOAD=…/libnccl.so.2``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning as L
import torch

EVERYWHERE = "TESTS_ON_GPU"
SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"


def has_room_for(ranks: int) -> bool:
    """Whether so many can run, each on a device of its own or all on one."""
    devices = torch.cuda.device_count()
    return devices >= ranks or bool(devices and os.environ.get(SHARED) == "1")


def device_type() -> str:
    return "cuda" if os.environ.get(EVERYWHERE) else "cpu"


def place_ranks() -> None:
    """Have Trainers that are made in this process find devices, if tests run on them or ask for them."""
    made = L.Trainer.__init__
    if hasattr(made, "places_ranks"):
        return

    @functools.wraps(made)
    def init(trainer: L.Trainer, *args: Any, **settings: Any) -> None:
        ranks = settings.get("devices", 1)
        is_a_rank = "TORCHELASTIC_RUN_ID" in os.environ
        if os.environ.get(EVERYWHERE) and settings.get("accelerator") == "cpu" and (is_a_rank or ranks == 1):
            settings["accelerator"] = "gpu"
        if settings.get("accelerator") == "gpu" and is_a_rank and ranks > torch.cuda.device_count():
            # as on so many machines of one device each
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
            settings |= {"devices": 1, "num_nodes": ranks}
        made(trainer, *args, **settings)

    init.places_ranks = True  # type: ignore[attr-defined]
    L.Trainer.__init__ = init  # type: ignore[method-assign]
