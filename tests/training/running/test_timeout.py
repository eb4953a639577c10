"""The setting ``timeout`` holds for each group of ranks, also those of the mesh, of which each has one worker."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, layout, loader

TIMEOUT_S = 2
AXES = ("data_parallel", "tensor_parallel")


def workers(group: Any) -> int:
    backend: Any = group._get_backend(torch.device("cpu"))
    return int(backend.options._threads)


class Alone(Model):
    """Rank 0 makes calls that no other rank makes; those wait for longer than it may."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.waited: dict[str, float] = {}
        self.workers: dict[str, int] = {}

    def on_fit_start(self) -> None:
        mesh: Any = self.device_mesh
        self.workers = {axis: workers(mesh[axis].get_group()) for axis in AXES} | {"world": workers(dist.group.WORLD)}
        if self.global_rank:
            time.sleep(4 * TIMEOUT_S)
            return
        for axis in AXES:
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=mesh[axis].get_group())
            self.waited[axis] = time.monotonic() - began


def fit() -> tuple[dict[str, int], dict[str, float]]:
    module = Alone()
    strategy = HybridShardStrategy(**layout(data=2, tensor=2), timeout=timedelta(seconds=TIMEOUT_S))
    with pytest.raises(BaseException, match=""):  # the groups can't be used any more
        L.Trainer(strategy=strategy, **{**QUIET, "devices": 4, "max_steps": 1}).fit(module, loader(4))
    return module.workers, module.waited


def test_calls_that_others_do_not_make_end_and_each_group_has_one_worker() -> None:
    """Two workers of a group that DTensor communicates over would write to the same memory."""
    found = run_ranks(fit, 4, elastic=True)
    assert [each for each, _ in found] == [dict.fromkeys((*AXES, "world"), 1)] * 4
    waited = found[0][1]
    assert waited.keys() == set(AXES)
    assert all(TIMEOUT_S - 0.5 < seconds < 3 * TIMEOUT_S for seconds in waited.values())
