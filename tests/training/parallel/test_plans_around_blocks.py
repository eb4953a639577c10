"""A plan that splits layers which a module holds beside its blocks: right, or refused by the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import PlanError
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.parity import QUIET
from tests.training.parallel.small import Descends

WIDTH = 16
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "enter": "colwise", "leave": "rowwise"}
BETWEEN = {"each": F.gelu, "all": partial(F.normalize, dim=-1), "softmax": partial(F.softmax, dim=-1)}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(self.up(x).relu(), 0.0))


class Backbone(nn.Module):
    """Has a projection of its own before its blocks."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.enter, self.leave = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(Feed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.leave(BETWEEN[self.between](self.enter(x)))
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


class OfItself(OfBackbone):
    """The same, held by the LightningModule itself; its step logs, counts, and keeps a statistic."""

    def __init__(self, between: str) -> None:
        super().__init__(between)
        self.enter, self.leave, self.layers = self.net.enter, self.net.leave, self.net.layers
        self.between = between
        del self.net
        self.mean = MeanMetric()
        self.losses: list[float] = []
        self.say = self.log
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        x = self.leave(BETWEEN[self.between](self.enter(batch["x"])))
        for layer in self.layers:
            x = layer(x)
        loss = F.mse_loss(self.head(x), batch["y"])
        self.losses.append(float(loss))
        self.seen += 1
        self.mean(loss)
        self.log("mean", self.mean)
        self.say("count", float(len(self.losses)) + float(self.seen), on_epoch=True)
        return {"loss": loss}


class Predicts(OfBackbone):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.head(self.net(batch["x"]))  # type: ignore[no-any-return]


class Frozen(OfBackbone):
    """Its network only makes features, without gradients."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            features = self.net(batch["x"])
        return F.mse_loss(self.head(features), batch["y"])


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


OF_A_DICT = {"coder.enter": "colwise", "coder.leave": "rowwise"}


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


@pytest.mark.parametrize(
    ("kind", "plan", "layout"),
    [
        (OfItself, PLAN, "tp2"),
        (InADict, OF_A_DICT, "tp2"),
        pytest.param(OfBackbone, PLAN, "dp2 x tp2", marks=pytest.mark.long),
    ],
)
def test_layers_beside_blocks_with_code_for_each_feature_between_them_train_alike(
    kind: type[OfBackbone], plan: dict[str, str], layout: str
) -> None:
    assert_trains_alike(partial(kind, "each"), batches, layout, tensor_parallel_plan=plan)


@pytest.mark.long
def test_a_split_head_behind_a_norm_of_the_first_stage() -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "out": "colwise_gather_output"}
    assert_trains_alike(NormFirst, batches, "pp2 x tp2", tensor_parallel_plan=plan)


def refusals() -> list[str]:
    found = []
    for kind, between in ((OfBackbone, "all"), (OfItself, "softmax"), (InADict, "all")):
        plan = OF_A_DICT if kind is InADict else PLAN
        strategy = HybridShardStrategy(tensor_parallel_size=2, tensor_parallel_plan=plan)
        trainer = L.Trainer(strategy=strategy, devices=2, max_steps=1, **QUIET)
        with pytest.raises(PlanError) as error:
            trainer.fit(kind(between), DataLoader([{"x": torch.ones(WIDTH), "y": torch.ones(WIDTH)}] * 8, batch_size=8))
        found.append(str(error.value))
    return found


def test_code_between_them_that_needs_all_features_is_refused_by_the_name_of_what_holds_them() -> None:
    for found in run_ranks(refusals, 2, elastic=True):
        for said, where in zip(found, ["net.leave", "leave", "coder.leave"], strict=True):
            assert said.startswith("tensor_parallel_plan: training_step computes something else when it is split")
            assert f"first in what {where} returns" in said


def without_training() -> list[str]:
    found = []
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    for kind, between in [(Predicts, "all"), (Frozen, "softmax")]:
        strategy = HybridShardStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
        trainer = L.Trainer(strategy=strategy, devices=2, max_steps=1, **QUIET)
        with pytest.raises(PlanError) as error:
            trainer.fit(kind(between), loader) if kind is Frozen else trainer.predict(kind(between), loader)
        found.append(str(error.value))
    return found


def test_it_is_refused_too_where_it_is_only_evaluated_or_runs_without_gradients() -> None:
    for found in run_ranks(without_training, 2, elastic=True):
        for said, who in zip(found, ["predict_step", "training_step"], strict=True):
            assert said.startswith(f"tensor_parallel_plan: {who} computes something else when it is split")


@pytest.mark.parametrize("kind", [Predicts, pytest.param(Frozen, marks=pytest.mark.long)])
def test_what_is_right_is_evaluated_alike(kind: type[OfBackbone]) -> None:
    assert_trains_alike(partial(kind, "each"), batches, ["tp2"], tensor_parallel_plan=PLAN)


class TakesGradients(OfItself):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].requires_grad_()
        y = self.leave(BETWEEN[self.between](self.enter(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        for layer in self.layers:
            y = layer(y)
        return F.mse_loss(self.head(y), batch["y"]) + slope.square().mean()


@pytest.mark.long
def test_a_step_that_takes_gradients_is_compared_too() -> None:
    assert_trains_alike(partial(TakesGradients, "each"), batches, ["tp2"], tensor_parallel_plan=PLAN)
    with pytest.raises(PlanError, match="training_step computes something else when it is split"):
        assert_trains_alike(partial(TakesGradients, "softmax"), batches, ["tp2"], tensor_parallel_plan=PLAN)


class OfOneRank(OfBackbone):
    """Its code takes for granted how many features a rank has."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        halves = self.net.enter(batch["x"]).view(-1, 2, WIDTH // 2)
        return F.mse_loss(self.head(self.net.leave(halves.flatten(1))), batch["y"])


def refused_for_its_sizes() -> str:
    strategy = HybridShardStrategy(tensor_parallel_size=2, tensor_parallel_plan=PLAN)
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(PlanError) as error:
        L.Trainer(strategy=strategy, devices=2, max_steps=1, **QUIET).fit(OfOneRank("each"), loader)
    return str(error.value)


def test_code_that_is_written_for_the_size_of_a_part_is_refused() -> None:
    for said in run_ranks(refused_for_its_sizes, 2, elastic=True):
        assert "training_step runs as it is split, but not with whole layers" in said
        assert "x.size(-1)" in said
