"""Generators that a step makes without a seed, and state of helpers' classes: as in one process, on every layout."""

from __future__ import annotations

import random

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike

WIDTH = 8
WHOLE = {"pipeline_parallel_size": 2, "microbatches": 1}


class Block(nn.Module):
    """Returns what it is given; on the stage that runs it, it makes generators too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        made = np.random.default_rng().random() + random.Random().random()
        return x + self.scale * (made + np.random.standard_normal())


class Denoises(L.LightningModule):
    """Its loss is zero where all stages draw the same noise, and another number elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.tensor(np.random.default_rng().standard_normal(batch.shape)).float() + random.Random().random()
        x = noise
        for block in self.blocks:
            x = block(x)
        return (x - noise).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Jitters(Denoises):
    """Adds one number of numpy's, which draws them in pairs, before each block; the loss is zero as above."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, added = batch.double(), 0.0
        for block in self.blocks:
            jitter = np.random.standard_normal()
            added += jitter
            x = block(x + jitter)
        return (x - batch - added).round(decimals=6).square().mean()


class Annealer:
    count = 0

    def weight(self) -> float:
        Annealer.count += 1
        return Annealer.count / 10


class Annealed(L.LightningModule):
    """The weight is another one if the first batch counts twice; the stage's part runs again for what is added last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.annealer = Annealer()
        Annealer.count = 0  # of an earlier run in this process

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weight = self.annealer.weight()
        first = x = self.first(batch)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x + first - batch).square().mean() * weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(8, WIDTH, generator=made) for _ in range(3)]


def test_stages_draw_the_same_from_generators_that_a_step_makes() -> None:
    assert_trains_alike(Denoises, batches, layouts=["pp2"])


def test_stages_draw_the_same_from_numpys_global_generator_around_blocks_that_draw_too() -> None:
    assert_trains_alike(Jitters, batches, layouts=["pp2"])


def test_the_first_batch_counts_once_in_the_class_of_a_helper() -> None:
    assert_trains_alike(Annealed, batches, layouts=[WHOLE])
