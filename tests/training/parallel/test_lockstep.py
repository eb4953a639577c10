"""Data ranks that call different blocks in evaluation steps: each computes what one process would, and none waits."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of

CALLS: list[tuple[list[int], list[int]]] = [
    ([0, 1, 2], [0, 2]),  # skips one in the first step, when nothing is known yet
    ([0, 1], [0, 1, 2]),
    ([0, 1, 2], [0, 1, 2]),
    ([], [2, 1, 0]),
    ([0, 1, 2, 0, 1], [0]),
    ([0, 1, 2], []),
    *[([0, 1, 2], [0, 1, 2])] * 2,
    *[([0, 2], [0, 2])] * 3,
]
"""The blocks that the first and the second data rank call in each step."""


class Varies(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rank = 0
        self.seen: list[Tensor] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = self.enter(batch)
        for block in CALLS[batch_idx][self.rank]:
            x = x + torch.tanh(self.layers[block](x))
        self.seen.append(x)


def validate(rank: int | None) -> list[Tensor]:
    module = Varies()

    class Takes(L.Callback):
        def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
            module.rank = trainer.global_rank if rank is None else rank

    trainer = trainer_of({} if rank is None else None, callbacks=[Takes()])
    data = torch.randn(len(CALLS), 8, generator=torch.Generator().manual_seed(1))
    pairs = data.repeat_interleave(2, 0) if rank is None else data  # both ranks read the same samples
    trainer.validate(module, DataLoader(pairs, batch_size=1), verbose=False)
    return module.seen


def test_each_rank_computes_what_one_process_does() -> None:
    for rank, seen in enumerate(run_ranks(validate, 2, None, elastic=True, timeout_s=60)):
        assert len(seen) == len(CALLS)
        for ours, plain in zip(seen, validate(rank), strict=True):
            torch.testing.assert_close(ours, plain)
