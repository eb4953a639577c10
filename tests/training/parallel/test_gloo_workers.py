"""Groups that DTensor communicates over have one worker each: two would write to the same memory."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, layout, loader


def workers(group: dist.ProcessGroup) -> int:
    backend: Any = group._get_backend(torch.device("cpu"))
    return int(backend.options._threads)


def fit() -> dict[str, int]:
    settings: dict[str, Any] = {**QUIET, "devices": 4, "max_steps": 1}
    trainer = L.Trainer(strategy=HybridShardStrategy(**layout(data=2, tensor=2)), **settings)
    module = Model("llama")
    trainer.fit(module, loader(4))
    mesh: Any = module.device_mesh
    axes = {axis: workers(mesh[axis].get_group()) for axis in ("data_parallel", "tensor_parallel")}
    return {**axes, "world": workers(dist.group.WORLD)}  # type: ignore[arg-type]


@pytest.mark.long
def test_each_axis_has_one_worker() -> None:
    assert run_ranks(fit, 4, elastic=True) == [{"data_parallel": 1, "tensor_parallel": 1, "world": 1}] * 4
