"""Code around the blocks adds up their outputs, as in a U: two microbatches run as one there too, with all checks."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET
from tests.training.pipeline.test_modules_as_written import WIDTH, Trained


class Residual(Trained):
    """Later stages add what they don't know of earlier ones to the batch, which has more samples in a joined run."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def test_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        errors = x.square().mean(1)
        self.log("mean", errors.mean())
        self.log("root", errors.mean().sqrt())
        return {"errors": errors, "number": len(errors)}

    def on_test_batch_end(self, outputs: Any, *_: Any) -> None:
        self.counted.append(outputs["number"])


def told_of_logs() -> tuple[list[str], list[int]]:
    L.seed_everything(1, verbose=False)
    samples = torch.randn(14, WIDTH) * torch.linspace(0.1, 4, 14)[:, None]  # of other microbatches, other errors
    loader: Any = DataLoader(TensorDataset(samples), batch_size=8)
    strategy = HybridShardStrategy(pipeline_parallel_size=2, microbatches=2)
    module = Residual()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        L.Trainer(devices=2, strategy=strategy, **QUIET).test(module, loader, verbose=False)
    texts = " ".join(str(each.message) for each in said)
    found = re.findall(r"self.log\('(.*?)', …\) is (?:a sum|no sum|no mean)", texts)
    return found, module.counted


def test_what_is_found_by_joining_microbatches_is_found_where_outputs_of_blocks_are_added_up() -> None:
    for told, counted in run_ranks(told_of_logs, 2, elastic=True)[:1]:
        assert (told, counted) == (["root"], [8, 6])
