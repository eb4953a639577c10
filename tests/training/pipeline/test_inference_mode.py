"""Steps that switch inference mode on themselves, as samplers do, give on stages what one process gives."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET
from tests.training.habits.harness import Net


class Sampler(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()

    @torch.inference_mode()
    def sample(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x - 0.1 * self.net(x).repeat(1, 2)
        x += 1
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            target = batch[:, :2].tanh()
        return (self.net(batch) - target.clone()).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.sample(batch).mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            return self.net(torch.cat([batch, batch + 1])).chunk(2)[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(sizes: dict[str, Any]) -> tuple[float, Tensor]:
    strategy: Any = HybridShardStrategy(**sizes) if sizes else "auto"
    trainer = L.Trainer(strategy=strategy, **{**QUIET, "devices": 2 if sizes else 1, "max_epochs": 2})
    loader: Any = DataLoader(list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=8)
    module = Sampler()
    trainer.fit(module, loader, loader)
    loss = float(trainer.callback_metrics["val"])
    predicted: Any = trainer.predict(module, loader)
    assert "no_grad" not in torch.inference_mode.__enter__.__name__
    return loss, torch.cat(predicted)


def test_they_are_those_of_one_process() -> None:
    expected, plain = run_ranks(run, 1, {}, init=False)[0]
    for loss, predicted in run_ranks(run, 2, {"pipeline_parallel_size": 2, "microbatches": 4}, elastic=True):
        assert loss == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(predicted, plain)
