"""Steps that compute something else from some epoch on: a term of the loss, more blocks, another batch size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import Descends

WIDTH = 8


class Grows(Descends):
    """A loss of the first block's result is added in the second epoch, and blocks in the third and fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        number, states = (2, 2, 3, 4, 4)[self.current_epoch], [batch]
        for block in self.blocks[:number]:
            states.append(states[-1] + block(states[-1]))
        loss = F.mse_loss(self.head(states[-1]), batch)
        loss = loss + states[1].square().mean() if self.current_epoch else loss
        self.log("loss", loss, sync_dist=True)
        return loss

    validation_step = training_step


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, length, WIDTH, generator=generator) for length in (3, 5, 3, 5)]


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.long)])
def test_what_crosses_is_looked_at_anew_in_each_epoch(schedule: str) -> None:
    """The second shape is known from the epoch before."""
    assert_trains_alike(Grows, batches, {"pipeline_parallel_size": 2, "schedule": schedule}, steps=16)
