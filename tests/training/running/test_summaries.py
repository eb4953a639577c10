"""ModelSummary on layouts: the table of one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, PLANS, QUIET, Model, layout, loader, world

PIPELINE, TENSOR = layout(pipeline=2), layout(tensor=2)


class Summarized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 16, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Told(ModelSummary):
    """Keeps what it is to print."""

    told: Any = None

    @staticmethod
    def summarize(columns: Any, total: int, trainable: int, *_: Any, **__: Any) -> None:  # type: ignore[override]
        Told.told = dict(columns), total, trainable


def summarized(sizes: dict[str, int] | None) -> list[Any]:
    """What summaries of two Trainers of one module show."""
    devices, data = (1, 1) if sizes is None else (world(sizes), sizes["data_parallel_size"])
    settings: dict[str, Any] = {**QUIET, "enable_model_summary": True, "devices": devices, "max_steps": 1}
    module, shown = Summarized(), []
    for _ in range(2):
        options: dict[str, Any] = {**(sizes or {}), "tensor_parallel_plan": PLANS["gpt"]}
        strategy: Any = "auto" if sizes is None else HybridShardStrategy(**options)
        trainer = L.Trainer(strategy=strategy, callbacks=[Told(max_depth=2)], limit_val_batches=0, **settings)
        trainer.fit(module, loader(GLOBAL_BATCH // data))
        shown.append(Told.told)
    return shown


@pytest.mark.parametrize("sizes", [PIPELINE, pytest.param(TENSOR, marks=pytest.mark.long)], ids=["pp2", "tp2"])
def test_summaries_of_an_example_are_those_of_one_process(sizes: dict[str, int]) -> None:
    ours, plain = run_ranks(summarized, 2, sizes, elastic=True)[0], summarized(None)
    for (columns, *counts), (expected, *counts_of_one) in zip(ours, plain, strict=True):
        assert counts == counts_of_one
        assert columns == expected
