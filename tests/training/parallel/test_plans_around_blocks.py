"""A plan that splits layers beside the blocks: in a module of their own, compared as a block, or whole ones.

Where a step that is looked at for this fails on some ranks only, all stop.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import PlanError, RankFailure
from lightning_shard.testing import RanksFailed, assert_trains_alike, run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends

WIDTH = 16
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
OF_CODER = {"coder.enter": "colwise", "coder.leave": "rowwise"}
BETWEEN = {"each": F.gelu, "all": partial(F.normalize, dim=-1)}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.up(x).relu(), 0.0))


class Coder(nn.Module):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(BETWEEN[self.between](self.enter(x)))


class Backbone(nn.Module):
    """Has a projection of its own before its blocks."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.coder = Coder(between)
        self.layers = nn.ModuleList(Feed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.coder(x)
        for layer in self.layers:
            x = layer(x)
        return x


class OfBackbone(Descends):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.net = Backbone(between)
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.net(batch["x"])), batch["y"])


class InADict(OfBackbone):
    """Its layers are alike, so that they are taken for blocks."""

    def __init__(self, between: str) -> None:
        super().__init__(between)
        self.coder = nn.ModuleDict({"enter": nn.Linear(WIDTH, 2 * WIDTH), "leave": nn.Linear(2 * WIDTH, WIDTH)})
        self.between = between
        del self.net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.coder["leave"](BETWEEN[self.between](self.coder["enter"](batch["x"])))
        return F.mse_loss(self.head(x), batch["y"])


class NormFirst(OfBackbone):
    """Its norm is placed on the first stage and used after the blocks: a split head gets what no stage has at first."""

    def __init__(self) -> None:
        super().__init__("each")
        self.norm, self.layers = nn.LayerNorm(WIDTH), self.net.layers
        self.out = nn.Linear(WIDTH, WIDTH)
        del self.net, self.head

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.out(self.norm(x)), batch["y"])


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [{name: torch.randn(8, WIDTH, generator=generator) for name in "xy"} for _ in range(2)]


@pytest.mark.long
def test_a_split_head_behind_a_norm_of_the_first_stage() -> None:
    plan = {**PLAN, "out": "colwise_gather_output"}
    assert_trains_alike(NormFirst, batches, "pp2 x tp2", tensor_parallel_plan=plan)


def test_a_module_that_holds_them_is_a_block_if_it_is_named() -> None:
    named: dict[str, Any] = {"tensor_parallel_plan": {**PLAN, **OF_CODER}, "pipeline_blocks": ["net.coder", "layers"]}
    assert_trains_alike(partial(OfBackbone, "each"), batches, "tp2", **named)
    with pytest.raises(PlanError, match=r"net\.coder computes something else when it is split.* net\.coder\.leave"):
        assert_trains_alike(partial(OfBackbone, "all"), batches, "tp2", **named)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2 x tp2", marks=pytest.mark.long)])
def test_a_module_beside_the_blocks_that_holds_split_layers_is_compared(layout: str) -> None:
    plan = {**PLAN, **OF_CODER}
    assert_trains_alike(partial(OfBackbone, "each"), batches, layout, tensor_parallel_plan=plan)
    with pytest.raises(PlanError, match=r"net\.coder computes something else when it is split.* net\.coder\.leave"):
        assert_trains_alike(partial(OfBackbone, "all"), batches, layout, tensor_parallel_plan=plan)


class OfItsOwn(OfBackbone):
    """Its own code is between the layers."""

    def __init__(self, between: str) -> None:
        super().__init__(between)
        self.enter, self.leave = self.net.coder.enter, self.net.coder.leave
        del self.net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.leave(F.gelu(self.enter(batch["x"])))), batch["y"])


def refusals() -> list[str]:
    found = []
    for kind, plan in ((OfItsOwn, {"enter": "colwise", "leave": "rowwise"}), (InADict, OF_CODER)):
        trainer = trainer_of({"tensor_parallel_size": 2, "tensor_parallel_plan": plan}, max_steps=1)
        with pytest.raises(PlanError) as error:
            trainer.fit(kind("each"), DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
        found.append(str(error.value))
    return found


def test_parts_of_features_outside_of_blocks_are_refused() -> None:
    for found in run_ranks(refusals, 2, elastic=True):
        for said, where in zip(found, ["enter", "coder.enter"], strict=True):
            assert said.startswith(f"tensor_parallel_plan: {where} would take or return a part of all features")


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
