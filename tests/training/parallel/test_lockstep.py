"""Data ranks that call different blocks in evaluation steps: each computes what one process would, and none waits."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET

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
MESSAGES = {2: 1, 7: 1, 10: 1}
"""Steps that call what the steps before them did: one small all-reduce."""


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


def validate(rank: int | None) -> tuple[list[Tensor], list[int]]:
    counts, reduce = [0], dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counts[-1] += tensor.device.type == "cpu" and tensor.dtype == torch.int64
        return reduce(tensor, *args, **kwargs)

    module = Varies()
    strategy: Any = HybridShardStrategy() if rank is None else "auto"

    class Counts(L.Callback):
        def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            counts.append(0)

        def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
            module.rank = trainer.global_rank if rank is None else rank

    trainer = L.Trainer(strategy=strategy, devices=2 if rank is None else 1, callbacks=[Counts()], **QUIET)
    data = torch.randn(len(CALLS), 8, generator=torch.Generator().manual_seed(1))
    pairs = data.repeat_interleave(2, 0) if rank is None else data  # both ranks read the same samples
    dist.all_reduce = counted
    try:
        trainer.validate(module, DataLoader(pairs, batch_size=1), verbose=False)
    finally:
        dist.all_reduce = reduce
    return module.seen, counts


def test_each_rank_computes_what_one_process_does() -> None:
    for rank, (seen, counts) in enumerate(run_ranks(validate, 2, None, elastic=True, timeout_s=60)):
        expected, _ = validate(rank)
        assert len(seen) == len(CALLS)
        for ours, plain in zip(seen, expected, strict=True):
            torch.testing.assert_close(ours, plain)
        assert {step: counts[step] for step in MESSAGES} == MESSAGES
