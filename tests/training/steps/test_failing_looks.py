"""A step that is looked at fails on some ranks only: all stop, with that cause."""

from __future__ import annotations

import os

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.errors import RankFailure
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import trainer_of
from tests.training.parallel.test_plans_around_blocks import PLAN, Feed, OfBackbone, batches

RUNS: list[str] = []


class FailsInALook(Feed):
    """Only where it is run more often, and only on some ranks."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append("block")  # which nothing puts back
        if len(RUNS) == 2 and int(os.environ["RANK"]) in self.ranks:
            raise ValueError("what a second run doesn't take")
        return super().forward(x)


class Fails(OfBackbone):
    def __init__(self, ranks: list[int]) -> None:
        super().__init__("each")
        self.net.layers[0] = FailsInALook(ranks)


def fit(ranks: list[int]) -> None:
    trainer = trainer_of({"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}, 4, max_steps=2)
    trainer.fit(Fails(ranks), DataLoader(batches(), batch_size=None))


@pytest.mark.parametrize("ranks", [pytest.param([2, 3], marks=pytest.mark.long), [3]])
def test_an_error_that_only_some_ranks_have_in_a_look_ends_all_with_it(ranks: list[int]) -> None:
    with pytest.raises(RanksFailed, match="failed first: ") as failed:
        run_ranks(fit, 4, ranks, elastic=True)
    assert {type(error) for error in failed.value.errors.values()} <= {ValueError, RankFailure}
    assert all("what a second run doesn't take" in str(error) for error in failed.value.errors.values())
    assert any(rank in failed.value.errors for rank in ranks)
