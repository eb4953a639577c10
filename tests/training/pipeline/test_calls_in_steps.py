"""How many Python calls of this library's functions a steady step makes: a count, and no clock."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of

OURS = os.path.dirname(lightning_shard.__file__)
FIRST, LAST = 9, 12
"""The steps that are counted: whichever look at more, as an epoch's first, second, fourth and eighth, were before."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 3)
        self.layers = nn.ModuleList(Block() for _ in range(8))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = self.enter(batch[0])
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(self.leave(x), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class Count(L.Callback):
    calls = 0

    def _seen(self, frame: Any, event: str, _: Any) -> None:
        self.calls += event == "call" and frame.f_code.co_filename.startswith(OURS)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        sys.setprofile(self._seen if FIRST <= trainer.global_step <= LAST else None)


def of_a_step(**layout: Any) -> float:
    count = Count()
    trainer = trainer_of(layout, max_epochs=1, max_steps=LAST + 2, callbacks=[count])
    values = torch.randn(400, 8), torch.randn(400, 3)
    trainer.fit(Blocks(), DataLoader(TensorDataset(*values), batch_size=8))
    assert trainer.global_step == LAST + 2
    return count.calls / (LAST + 1 - FIRST)


@pytest.mark.parametrize(
    ("layout", "most"), [({}, 500), ({"pipeline_parallel_size": 2, "microbatches": 4}, 1200)], ids=["dp2", "pp2"]
)
def test_a_steady_step_makes_few_calls(layout: dict[str, int], most: int) -> None:
    for calls in run_ranks(of_a_step, 2, elastic=True, **layout):
        assert 100 < calls <= most
