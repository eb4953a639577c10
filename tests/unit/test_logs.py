"""What ``self.log`` says of a batch whose microbatches were logged one by one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, Metric, SumMetric

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Passage
from lightning_shard.pipeline.dataflow.trace import Trace
from lightning_shard.plugin.steps.checks.nonlinear_logs import noting_functions_of_means
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


def test_what_is_logged_twice_by_one_name_is_two_logs() -> None:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding(2):
        for value in (1.0, 2.0):
            logs.begin_microbatch()
            module.log("x", value)
            module.log("x", 10 * value)
    assert [(name, float(value)) for name, value, _ in logs.combined()] == [("x", 1.5), ("x", 15.0)]


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


def test_what_cant_be_logged_is_lightnings_to_say() -> None:
    module = Module()
    with HeldLogs(module).holding(2), pytest.raises(ValueError, match="`str` values cannot be logged"):
        module.log("x", "text")  # type: ignore[arg-type]


def traced() -> AbstractContextManager[None]:
    return Trace(Passage(0, {}, searching=True)).running()


def test_functions_of_means_are_warned_of_and_means_of_functions_not() -> None:
    samples = torch.rand(2, 4) + 1
    temperature = torch.tensor(2.0)
    ways = {
        "exp": lambda x: x.mean().exp(),
        "sqrt": lambda x: (x.square().mean() + 1).sqrt().detach() * 2,
        "log10": lambda x: 10 * torch.log10(4 / x.mean()),
        "pow": lambda x: x.mean() ** 0.5,
        "std": lambda x: x.std() / 2,
        "max": lambda x: torch.stack([each.mean() for each in x.split(2)]).max(),
        "norm": lambda x: x.norm(dim=-1),
    }
    for name, way in ways.items():
        with noting_functions_of_means(4), traced():
            values = [way(part) for part in samples]
        with pytest.warns(
            UserWarning, match=rf"'x'.* logs ({name}|rtruediv|rdiv) (of a number|over the values) of each"
        ):
            combined(values)
    with noting_functions_of_means(4), traced():
        plain = [[x.exp().mean() * 3 + x.mean(), x.unflatten(0, (2, 2)).std(-1).mean()] for x in samples]
        same = [temperature.exp() for _ in samples]
        learned = [nn.Parameter(torch.rand(())).exp() for _ in samples]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in (*zip(*plain), same, learned):
            combined([*values])


def test_sums_over_samples_are_warned_of_and_sums_of_losses_not() -> None:
    samples = torch.rand(2, 4)
    ways = {
        "count": lambda x: (x >= 0).sum().float(),
        "of losses": lambda x: F.mse_loss(x, x + 1, reduction="sum").detach(),
        "two": lambda x: x.sum() + x.square().sum(),
    }
    for way in ways.values():
        with noting_functions_of_means(4), traced():
            values = [way(part) for part in samples]
        with pytest.warns(UserWarning, match=r"'x'.* logs a sum over samples of each microbatch"):
            combined(values)
    weight = nn.Parameter(torch.rand(4))
    with noting_functions_of_means(2), traced():
        plain = [[x.sum() / 4, (x > 0.5).sum() / len(x), x.sum() * 0.25, weight.sum()] for x in samples]
        tasks = [(torch.stack([x.mean(), x.square().mean()]) * 2 + 1).sum() for x in samples]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for values in (*zip(*plain), tasks):
            combined([*values])


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


def test_functions_are_warned_of_in_a_later_batch_if_microbatches_had_equal_values_in_the_first() -> None:
    logs = HeldLogs(module := Module())

    def step(values: Sequence[float]) -> None:
        with logs.holding(2), noting_functions_of_means(4), traced():
            for value in values:
                logs.begin_microbatch()
                module.log("x", torch.tensor(value).exp())
        logs.combined()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step([1.0, 1.0])
    with pytest.warns(UserWarning, match=r"'x'.* logs exp of a number"):
        step([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step([1.0, 3.0])
