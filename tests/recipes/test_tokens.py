"""Tokens per second, as the recipes' progress bar shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokens import TokensPerSecond, tokens_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends


class Model(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.flatten(0, 1), batch["input_ids"].flatten())


def seen(devices: int, **layout: int) -> list[float]:
    """The rates of four batches, each of which takes a second."""
    now = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokens.time.perf_counter", lambda: float(next(now)))
        rows = [{"input_ids": torch.arange(5)}] * 16
        size = 4 if devices == 1 or layout else 2
        trainer = trainer_of(layout if devices > 1 else None, devices, max_epochs=1, callbacks=[TokensPerSecond()])
        trainer.fit(Model(), DataLoader(rows, batch_size=size))
    return [float(trainer.callback_metrics["tokens/s"])]


def test_a_rate_counts_each_token_once_on_every_layout() -> None:
    assert seen(1) == [20.0]
    assert run_ranks(seen, 2, 2, elastic=True) == [[20.0]] * 2
    assert run_ranks(seen, 2, 2, elastic=True, pipeline_parallel_size=2) == [[20.0]] * 2


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), 10),
        ((torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2)), 10),
        ({"mask": torch.ones(2, 5), "input_ids": torch.zeros(2, 3, dtype=torch.int64)}, 6),
        (torch.zeros(2, 5), 0),
        ({"pixels": torch.zeros(2, 3, 4, 4)}, 0),
        ([], 0),
    ],
)
def test_a_batch_tells_its_tokens_or_nothing(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens
