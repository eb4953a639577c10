"""A refusal of state that microbatches carry on names what the user keeps, and nothing of ours."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike

WIDTH = 8


class Running(nn.Module):
    """Subtracts a running mean."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.seen += 1
        return x - self.mean


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.running = Running()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.running(batch))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        result = self(batch)  # which runs our hooks on the LightningModule
        return (result - 2 * batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=made) for _ in range(3)]


def test_running_statistics_before_the_blocks_are_named_alone() -> None:
    with pytest.raises(StepError, match=r"has left \(running\.mean, running\.seen changes\)"):
        assert_trains_alike(Module, batches, layouts=["pp2"])
