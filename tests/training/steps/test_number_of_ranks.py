"""Code that scales by the Trainer's number of ranks is told where batches are dealt to fewer."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, layout, loader

TOLD = "asks for world_size, which is the number of ranks, 2; batches are dealt to 1 data ranks"


class Scaled(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.world_size)


class ScaledByStrategy(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01 * self.trainer.strategy.world_size)


def fit(kind: type[Model], sizes: dict[str, int]) -> tuple[float, list[str]]:
    trainer = L.Trainer(strategy=HybridShardStrategy(**sizes), **{**QUIET, "devices": 2, "max_steps": 1})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(kind("gpt"), loader(8))
    found = [each for each in said if "number of ranks" in str(each.message)]
    return trainer.optimizers[0].param_groups[0]["lr"], [str(each.message) for each in found]


CASES = [
    (Scaled, layout(pipeline=2), [True]),
    (ScaledByStrategy, layout(pipeline=2), [True]),
    (Scaled, layout(data=2), []),
]


def fit_each() -> list[tuple[float, list[str]]]:
    return [fit(kind, sizes) for kind, sizes, _ in CASES]


def test_code_that_scales_by_the_number_of_ranks_is_told() -> None:
    for rank, found in enumerate(run_ranks(fit_each, 2, elastic=True)):
        for (kind, sizes, told), (rate, texts) in zip(CASES, found, strict=True):
            assert rate == pytest.approx(0.02) or kind is not Scaled, sizes
            assert [TOLD in text for text in texts] == (told if rank == 0 else []), (kind, sizes)
