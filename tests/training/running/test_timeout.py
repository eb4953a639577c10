"""The setting ``timeout`` holds for each group of ranks, also those of the mesh: a call that others don't make ends."""

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


class Alone(Model):
    """Rank 0 makes calls that no other rank makes; those wait for longer than it may."""

    def __init__(self) -> None:
        super().__init__("llama")
        self.waited: dict[str, float] = {}

    def on_fit_start(self) -> None:
        if self.global_rank:
            time.sleep(4 * TIMEOUT_S)
            return
        mesh: Any = self.device_mesh
        for axis in ("data_parallel", "tensor_parallel"):
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=mesh[axis].get_group())
            self.waited[axis] = time.monotonic() - began


def fit() -> dict[str, float]:
    module = Alone()
    strategy = HybridShardStrategy(**layout(data=2, tensor=2), timeout=timedelta(seconds=TIMEOUT_S))
    with pytest.raises(BaseException, match=""):  # the groups can't be used any more
        L.Trainer(strategy=strategy, **{**QUIET, "devices": 4, "max_steps": 1}).fit(module, loader(4))
    return module.waited


def test_calls_that_others_do_not_make_end() -> None:
    waited = run_ranks(fit, 4, elastic=True)[0]
    assert waited.keys() == {"data_parallel", "tensor_parallel"}
    assert all(TIMEOUT_S - 0.5 < seconds < 3 * TIMEOUT_S for seconds in waited.values())
