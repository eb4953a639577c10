"""Blocks measured on the device at hand: what takes long is seen to, and a step is timed by it."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from benchmarks.lib.sleeping import Sleeping
from lightning_shard.dryrun.planning import plan
from lightning_shard.dryrun.timing.calibrate import calibrate, device_at_hand
from lightning_shard.dryrun.timing.rates import PRODUCTS


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeping.apply(self.layer(x), self.seconds, 2 * self.seconds)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, (0.02, 0.06)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters())


def test_blocks_are_measured_and_a_step_is_timed_by_them() -> None:
    batch = torch.randn(8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = calibrate(Module, batch, microbatches=4, times=2, pipeline_blocks=["blocks.0", "blocks.1"])
        assert measured.samples == 2
        for name, seconds in (("blocks.0", 0.02), ("blocks.1", 0.06)):
            forward, backward = measured.seconds[name]
            assert seconds <= forward
            assert 2 * seconds <= backward
        made = plan(
            Module,
            batch,
            layout={"pipeline_parallel_size": 2},
            microbatches=4,
            placement="even",
            pipeline_blocks=["blocks.0", "blocks.1"],
            device_type="cpu",
            device=device_at_hand("cpu"),
            measured=measured,
        )
    assert made.time is not None
    slower = sum(measured.seconds["blocks.1"])
    assert made.time.step == pytest.approx(4 * slower + sum(measured.seconds["blocks.0"]), rel=0.05)
    assert made.time.dominates == PRODUCTS
    assert any("nothing is counted for links" in said for said in made.time.assumed)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_batch_is_of_the_modules_precision(precision: str) -> None:
    measured = calibrate(Module, torch.randn(8, 8), times=1, precision=precision, device_type="cpu")
    assert {"blocks.0", "blocks.1"} <= measured.seconds.keys()
