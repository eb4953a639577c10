"""Steps that take entries out of their batch, or write to it, where a stage runs a microbatch more than once."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike
from tests.training.habits.harness import WIDTH, Block

CLASSES = 5


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        y = batch.pop("y")
        batch["x"].mul_(2)
        batch["x"] = batch["x"].tanh()
        return F.cross_entropy(self(batch["x"]), y)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(5)
    x, y = torch.randn(3, 8, 4, generator=made), torch.randint(0, CLASSES, (3, 8), generator=made)
    return [{"x": each, "y": of_each} for each, of_each in zip(x, y)]


def count(batch: dict[str, Tensor]) -> Tensor:
    """What a step has taken out by the end."""
    return (batch["y"] >= 0).sum()


def test_each_run_is_given_the_batch_as_it_was() -> None:
    settings: list[dict[str, Any]] = [{}, {"schedule": "Interleaved1F1B", "loss_weight": count}]
    assert_trains_alike(
        Module, batches, [{"pipeline_parallel_size": 2, "microbatches": 4, **each} for each in settings]
    )
