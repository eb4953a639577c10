"""Metrics over all ranks and on all stages: copies, as torchmetrics makes, those that hold others, and with lists."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, MetricTracker, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.regression import MeanAbsoluteError

from tests.alike import Trains, assert_train_alike
from tests.training.parallel.small import INTERLEAVED, WIDTH, Trained, batches


class Module(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(
            MetricCollection([MeanSquaredError(), MeanAbsoluteError()]), maximize=[False, True]
        )
        self.metric = MeanSquaredError()
        self.extremes = MinMaxMetric(MeanMetric())

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()
        self.cloned = self.metric.clone()
        self.also = copy.deepcopy(self.metric)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        result = self(batch)
        self.tracker.update(result, batch)
        self.cloned.update(result, batch)
        self.also(result, 2 * batch)
        self.extremes.update(result)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.tracker.compute())
        self.log("cloned", self.cloned.compute())
        self.log("also", self.also.compute())
        self.log_dict(self.extremes.compute())
        best: Any = self.tracker.best_metric()
        self.log("best", best["MeanSquaredError"])


class Collects(Trained):
    """Calls and updates metrics that keep lists, in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = MetricCollection({"auroc": MulticlassAUROC(WIDTH), "acc": MulticlassAccuracy(WIDTH)})
        self.logged, self.updated = MulticlassAUROC(WIDTH), MulticlassAUROC(WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        result = self(batch)
        # Metric.forward empties its lists for the batch's value, and then sets new ones; update adds to them
        for call in (self.collected, self.logged, self.updated.update):
            call(result.softmax(-1), batch.argmax(-1))
        self.log("logged", self.logged, on_step=False, on_epoch=True)
        return (result - 2 * batch).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.collected.compute())
        self.log("updated", self.updated.compute())


def test_they_are_computed_over_all_ranks_and_on_all_stages() -> None:
    copies, lists = Trains(Module, batches, "pp2 x dp2"), Trains(Collects, batches, INTERLEAVED)
    assert_train_alike({"copies, trackers and those that hold others": copies, "with lists": lists})
