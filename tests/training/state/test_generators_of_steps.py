"""Generators around blocks that draw too, or that a step makes without a seed, and state of helpers' classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import WIDTH, Descends, batches

WHOLE = {"pipeline_parallel_size": 2, "microbatches": 1}


class Block(nn.Module):
    """Returns what it is given; on the stage that runs it, it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * np.random.standard_normal()


class Denoises(Descends):
    """The stages draw other noise, each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        noise = torch.tensor(np.random.default_rng().standard_normal(batch.shape)).float()
        x = noise
        for block in self.blocks:
            x = block(x)
        return (x - noise).square().mean()

    validation_step = training_step


class Jitters(Denoises):
    """Adds one number of numpy's, which draws them in pairs, before each block.

    Its loss is zero where all stages draw the same ones, and another number elsewhere.
    """

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, added = batch.double(), 0.0
        for block in self.blocks:
            jitter = np.random.standard_normal()
            added += jitter
            x = block(x + jitter)
        return (x - batch - added).round(decimals=6).square().mean()

    validation_step = training_step


class Annealer:
    count = 0

    def weight(self) -> float:
        Annealer.count += 1
        return Annealer.count / 10


class Annealed(Descends):
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


def test_generators_that_a_step_makes_without_a_seed_are_refused_on_stages() -> None:
    with pytest.raises(StepError, match="draws from a generator that it makes without a seed"):
        assert_trains_alike(Denoises, batches, layouts=["pp2"])


def test_stages_draw_the_same_from_numpys_global_generator_around_blocks_that_draw_too() -> None:
    assert_trains_alike(Jitters, batches, layouts=["pp2"])


def test_the_first_batch_counts_once_in_the_class_of_a_helper() -> None:
    assert_trains_alike(Annealed, batches, layouts=[WHOLE])
