"""A step that is looked at fails on some ranks only: all stop, with that cause."""

from __future__ import annotations

import os
from collections.abc import Callable

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import RankFailure
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import QUIET
from tests.training.parallel.test_plans_around_blocks import PLAN, Backbone, Feed, OfBackbone, batches

RUNS: list[str] = []


class FailingFeed(Feed):
    def __init__(self, fail: Callable[[], None] | None) -> None:
        super().__init__()
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        if self.fail is not None:
            self.fail()
        return super().forward(x)


class FailsInALook(Backbone):
    """Only where it is run more often, and only on some ranks: before its blocks, or in one of them."""

    def __init__(self, where: str, ranks: list[int]) -> None:
        super().__init__("each")
        self.where, self.ranks = where, ranks
        self.layers[0] = FailingFeed(self.fail if where == "block" else None)

    def fail(self) -> None:
        RUNS.append(self.where)  # which nothing puts back
        if len(RUNS) == 2 and int(os.environ["RANK"]) in self.ranks:
            raise ValueError("what a second run doesn't take")

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "around":
            self.fail()
        return super().forward(x)


class Fails(OfBackbone):
    def __init__(self, where: str, ranks: list[int]) -> None:
        super().__init__("each")
        self.net = FailsInALook(where, ranks)


def fit(where: str, ranks: list[int]) -> None:
    strategy = HybridShardStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    trainer = L.Trainer(strategy=strategy, devices=4, max_steps=2, **QUIET)
    trainer.fit(Fails(where, ranks), DataLoader(batches(), batch_size=None))


@pytest.mark.parametrize(("where", "ranks"), [pytest.param("around", [2, 3], marks=pytest.mark.long), ("block", [3])])
def test_an_error_that_only_some_ranks_have_in_a_look_ends_all_with_it(where: str, ranks: list[int]) -> None:
    with pytest.raises(RanksFailed, match="failed first: ") as failed:
        run_ranks(fit, 4, where, ranks, elastic=True)
    assert {type(error) for error in failed.value.errors.values()} <= {ValueError, RankFailure}
    assert all("what a second run doesn't take" in str(error) for error in failed.value.errors.values())
    assert any(rank in failed.value.errors for rank in ranks)
