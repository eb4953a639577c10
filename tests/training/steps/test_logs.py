"""What ``self.log`` says of a batch whose microbatches were logged one by one."""

from __future__ import annotations

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
    with logs.holding():
        for value in values:
            logs.begin_microbatch()
            module.log("x", value, **options)
    return logs.combined()


@pytest.mark.parametrize(
    ("values", "reduce_fx", "of_batch"),
    [
        ([1.0, 2.0], "mean", 1.5),
        ([torch.tensor([1.0]), torch.tensor([2.0])], torch.mean, 1.5),
        ([4, torch.tensor(6)], "avg", 5.0),
        ([3, 4], "sum", 7.0),
        ([torch.tensor(0.5), torch.tensor(0.25)], torch.sum, 0.75),
        ([torch.tensor(0.5), 0.25], torch.max, 0.5),
        ([4, 3], "MIN", 3.0),
    ],
)
def test_values_are_combined_as_they_would_be_reduced(values: list[Any], reduce_fx: Any, of_batch: float) -> None:
    assert combined(values, reduce_fx=reduce_fx) == of_batch
    assert combined(values[:1], reduce_fx=reduce_fx) == values[0]
    doubles = [torch.tensor(float(value), dtype=torch.float64) for value in values]
    assert reduce_fx in ("sum", torch.sum) or combined(doubles, reduce_fx=reduce_fx).dtype == torch.float64


def test_a_batch_size_of_some_microbatches_only_is_not_taken_for_the_batchs() -> None:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding():
        module.log("x", 1.0, batch_size=3)
        logs.begin_microbatch()
        module.log("x", 5.0)
    assert logs.combined() == [("x", 3.0, {})]


def test_means_are_weighted_by_batch_size() -> None:
    module = Module()
    logs = HeldLogs(module)
    with logs.holding():
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


@pytest.mark.parametrize(("metric", "of_batch"), [("total", 7.0), ("highest", 4.0)])
def test_a_metrics_value_for_the_step_is_of_the_batch(metric: str, of_batch: float) -> None:
    module = Module()
    logs = HeldLogs(module)
    found: Metric = getattr(module, metric)
    with logs.holding():
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
    with logs.holding():
        module.log("x", 1.0, "val")  # type: ignore[arg-type]
        logs.begin_microbatch()
        module.log("x", 2.0, "val")  # type: ignore[arg-type]
        with pytest.raises(StepError, match=r"self\.log\('y', …\) of a Tensor: .* must be numbers"):
            module.log("y", torch.zeros(3))
    logs.emit(logs.combined())
    assert own.__self__.said == ("val/x", 1.5, {})  # type: ignore[attr-defined]
    assert module.log == own
