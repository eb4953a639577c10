"""What ``self.log`` says of a batch whose microbatches were logged one by one."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import MaxMetric, Metric, SumMetric

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.logs import HeldLogs, LoggedMetric


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.highest = MaxMetric()


def combined(values: list[Any], **options: Any) -> Any:
    [(name, value, _)] = _combined(values, **options)
    assert name == "x"
    return value


def _combined(values: list[Any], **options: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding(len(values)):
        for value in values:
            logs.begin_microbatch()
            module.log("x", value, **options)
    return logs.combined()


def test_floats_are_means_over_samples() -> None:
    assert combined([1.0, 2.0]) == 1.5
    assert combined([torch.tensor([1.0]), torch.tensor([2.0])], reduce_fx=torch.mean) == 1.5
    assert combined([torch.tensor(1.0, dtype=torch.float64)] * 3).dtype == torch.float64


def test_a_batch_size_of_some_microbatches_only_is_not_taken_for_the_batchs() -> None:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding(2):
        module.log("x", 1.0, batch_size=3)
        logs.begin_microbatch()
        module.log("x", 5.0)
    assert logs.combined() == [("x", 3.0, {})]


def test_means_are_weighted_by_batch_size() -> None:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding(3):
        for value, size in ((1.0, 3), (5.0, 1), (float("nan"), 0)):
            logs.begin_microbatch()
            module.log("x", value, batch_size=size)
    assert logs.combined() == [("x", torch.tensor(2.0), {"batch_size": 4})]


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_mean_over_nothing_is_what_one_process_has_for_it(value: float) -> None:
    """0 became NaN, by which the epoch's mean was too."""
    [(_, logged, options)] = _combined([value] * 2, batch_size=0)
    assert str(float(logged)) == str(value)
    assert options == {"batch_size": 0}


def test_integers_that_are_summed_count_samples() -> None:
    assert combined([3, 4], reduce_fx="sum") == 7
    assert combined([torch.tensor(3), torch.tensor(4)], reduce_fx=torch.sum) == 7


@pytest.mark.parametrize(
    ("value", "reduce_fx"),
    [
        (4, "mean"),  # len(batch), or the epoch's number
        (torch.tensor(4), "avg"),
        (True, "mean"),
        (0.5, "sum"),  # a sum over samples, or their mean
        (torch.tensor(0.5), torch.max),  # the largest of samples, or of their means
        (4, "MIN"),
    ],
)
def test_what_may_be_of_the_batch_or_of_its_samples_is_refused(value: Any, reduce_fx: Any) -> None:
    with pytest.raises(StepError, match=r"'x'.* for each microbatch, .*log .*on_train_batch_end"):
        combined([value, value], reduce_fx=reduce_fx)
    assert combined([value], reduce_fx=reduce_fx) == value  # the batch is one microbatch


def test_sums_of_integers_are_told_once_to_be_over_microbatches() -> None:
    module = Module()
    logs = HeldLogs(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with logs.holding(2):
                pass
            logs.emit([("x", torch.tensor(7.0), {"reduce_fx": "sum"})])
    assert sum("adds up what the microbatches log" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize(("metric", "of_batch"), [("total", 7.0), ("highest", 4.0)])
def test_a_metrics_value_for_the_step_is_of_the_batch(metric: str, of_batch: float) -> None:
    module = Module()
    logs = HeldLogs(module)
    found: Metric = getattr(module, metric)
    with logs.holding(2):
        for value in (3.0, 4.0):
            logs.begin_microbatch()
            found(value)
            module.log("x", found)
    [(_, logged, _)] = logs.combined()
    assert isinstance(logged, LoggedMetric)
    assert logged.of_step == of_batch


class OwnLog(Module):
    def log(self, name: str, value: Any, split: str = "train", **options: Any) -> None:  # type: ignore[override]
        self.said = (f"{split}/{name}", value, options)


@pytest.mark.parametrize("on_object", [False, True])
def test_a_log_of_the_users_own_is_told_once_of_the_batch(on_object: bool) -> None:
    module = OwnLog()
    if on_object:
        of_class, module = module.log, Module()
        module.log = of_class  # type: ignore[method-assign]
    own, logs = module.log, HeldLogs(module)
    with logs.holding(2):
        module.log("x", 1.0, "val")  # type: ignore[arg-type]
        logs.begin_microbatch()
        module.log("x", 2.0, "val")  # type: ignore[arg-type]
        with pytest.raises(StepError, match=r"self\.log\('y', …\) of a Tensor by a log of the user's own"):
            module.log("y", torch.zeros(3))
    logs.emit(logs.combined())
    assert own.__self__.said == ("val/x", 1.5, {})  # type: ignore[attr-defined]
    assert module.log == own


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_where_a_log_stands_may_be_an_integer(name: str) -> None:
    logs = HeldLogs(module := Module())
    with logs.holding(2):
        for _ in range(2):
            logs.begin_microbatch()
            module.log(name, 7)
    assert logs.combined()[0][:2] == (name, 7.0)
    with logs.holding(2), pytest.raises(StepError, match="can't be combined"):
        module.log("samples", 7)
