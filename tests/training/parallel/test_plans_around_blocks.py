"""A plan that splits layers which a module holds beside its blocks: right, or refused by the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_shard.errors import PlanError
from tests.alike import Trains, assert_train_alike
from tests.parity import layout as sizes
from tests.refusals import Refusal, assert_refused
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


class TakesGradients(OfItself):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"].requires_grad_()
        y = self.leave(BETWEEN[self.between](self.enter(x)))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        for layer in self.layers:
            y = layer(y)
        return F.mse_loss(self.head(y), batch["y"]) + slope.square().mean()


def split(kind: type[OfBackbone], plan: dict[str, str] = PLAN, layout: str = "tp2") -> Trains:
    """With code for each feature between the layers."""
    return Trains(partial(kind, "each"), batches, layout, options={"tensor_parallel_plan": plan})


HEAD = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "out": "colwise_gather_output"}
ALIKE = {"the module's": split(OfItself), "a dict's": split(InADict, OF_A_DICT), "evaluated": split(Predicts)}
ALIKE_TOO = {
    "on data ranks": split(OfBackbone, PLAN, "dp2 x tp2"),
    "without gradients": split(Frozen),
    "with gradients of its own": split(TakesGradients),
    "a split head behind a norm of the first stage": Trains(
        NormFirst, batches, "pp2 x tp2", options={"tensor_parallel_plan": HEAD}
    ),
}


@pytest.mark.parametrize("cases", [ALIKE, pytest.param(ALIKE_TOO, marks=pytest.mark.long)], ids=["some", "others"])
def test_layers_beside_blocks_train_alike(cases: dict[str, Trains]) -> None:
    assert_train_alike(cases)


class OfOneRank(OfBackbone):
    """Its code takes for granted how many features a rank has."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        halves = self.net.enter(batch["x"]).view(-1, 2, WIDTH // 2)
        return F.mse_loss(self.head(self.net.leave(halves.flatten(1))), batch["y"])


def refused(kind: type[OfBackbone], between: str, says: str, plan: dict[str, str] = PLAN, **more: Any) -> Refusal:
    options = {"tensor_parallel_plan": plan}
    return Refusal(sizes(tensor=2), partial(kind, between), PlanError, says, options, batches, **more)


def differs(who: str, where: str = "") -> str:
    return rf"^tensor_parallel_plan: {who} computes something else when it is split.*first in what {where}"


def test_code_between_them_that_needs_all_features_is_refused_by_the_name_of_what_holds_them() -> None:
    """Also where it is only evaluated, runs without gradients, or takes some."""
    step = "training_step"
    assert_refused(
        {
            "the network's": refused(OfBackbone, "all", differs(step, "net.leave returns")),
            "the module's": refused(OfItself, "softmax", differs(step, "leave returns")),
            "a dict's": refused(InADict, "all", differs(step, "coder.leave returns"), OF_A_DICT),
            "predicting": refused(Predicts, "all", differs("predict_step"), method="predict"),
            "without gradients": refused(Frozen, "softmax", differs(step)),
            "with gradients of its own": refused(TakesGradients, "softmax", differs(step)),
            "written for the size of a part": refused(
                OfOneRank, "each", r"training_step runs as it is split, but not with whole layers.*x\.size\(-1\)"
            ),
        }
    )
