"""``strategy.held_memory()``: what each device holds in a run is what its shards take."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.reporting.memory import HeldMemory
from lightning_shard.testing import run_ranks
from tests.parity import Model, layout, train, world


class Asks(L.Callback):
    def __init__(self) -> None:
        self.at_start: Any = None
        self.in_last_step: Any = None

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at_start = trainer.strategy.held_memory()

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_last_step = trainer.strategy.held_memory()


def ask(sizes: dict[str, int]) -> tuple[HeldMemory, HeldMemory]:
    asks = Asks()
    train("gpt", sizes, steps=2, callbacks=[asks])
    return asks.at_start, asks.in_last_step


@pytest.mark.parametrize("sizes", [layout(pipeline=2), layout(data=2)], ids=["pp2", "dp2"])
def test_all_ranks_together_hold_the_model_its_gradients_and_moments_once(sizes: dict[str, int]) -> None:
    (start, later), other = run_ranks(ask, world(sizes), sizes, elastic=True)
    assert other == (start, later)  # each is told of all
    model = sum(p.numel() * p.itemsize for p in Model().parameters())
    stages = [each.stages for each in start.ranks]
    assert stages == ([(1,), (0,)] if sizes["pipeline_parallel_size"] > 1 else [(0,), (0,)])
    assert sum(each.parameters for each in start.ranks) == model
    assert all(each.gradients == each.optimizer == 0 for each in start.ranks)
    for before, now in zip(start.ranks, later.ranks):
        assert now.parameters == now.gradients == before.parameters
        assert 2 * now.parameters < now.optimizer < 2.1 * now.parameters  # AdamW's, and a number for each parameter
        assert now.allocated is None
    assert str(later).splitlines()[0].split() == [
        "rank",
        "stage",
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
        "counted",
    ]


def test_before_a_fit_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a fit or an evaluation that has begun"):
        HybridShardStrategy().held_memory()
