"""Datasets that are longer on one rank than on another."""

from __future__ import annotations

import os

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET, Model, Tokens


def fit(stages: int) -> None:
    strategy = HybridShardStrategy(pipeline_parallel_size=stages)
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
    trainer.fit(Model("gpt"), DataLoader(Tokens(48 if os.environ["RANK"] == "0" else 32), batch_size=8))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_dataset_of_another_length_on_another_rank_is_refused_before_the_first_step(stages: int) -> None:
    first, other = {1: (3, 2), 2: (6, 4)}[stages]
    told = f"a Tokens gives {first} batches on rank 0 and {other} batches on rank 1"
    with pytest.raises(RanksFailed, match=f"ConfigurationError: A DataLoader of {told}"):
        run_ranks(fit, 2, stages, elastic=True)
