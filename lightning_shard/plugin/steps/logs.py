"""Collects ``self.log`` calls of a pipelined step per microbatch, combines them, and logs once on every stage.

Only the last stage sees losses and metrics. What it logged for each microbatch is combined into what it would have
logged for the whole batch, sent to all stages and logged there once. So progress bars, monitors, early stopping and
schedulers agree on all ranks.

- Microbatches' values are combined by ``reduce_fx``: a mean over samples, weighted by ``batch_size`` where that is
  given, a sum, the least or the largest. The rehearsal reports what isn't the batch's then, as one number per batch.
- A log in a call of a block, as by hooks inside of it, runs on the block's stage only: it is refused.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Number
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from lightning_shard.errors import StepError
from lightning_shard.lightning_private import logging_by
from lightning_shard.pipeline.dataflow.taint import refuse
from lightning_shard.plugin.steps.checks.rehearsal import Number as Given


@dataclass
class Record:
    """One ``self.log`` call of the step, over all microbatches."""

    name: str
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoggedMetric:
    """A logged torchmetrics Metric: its path in the module, and its value for the step.

    First that of one microbatch, then the batch's: the sum, minimum or maximum for those aggregators, else the mean.
    """

    path: str
    of_step: Tensor | None


class HeldLogs:
    """Replaces a module's ``log`` during a step, and holds the records.

    Args:
        block: Returns the name of the block that is being called, if any is.
        is_silent: Whether the code that runs is to log nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        block: Callable[[], str | None] = lambda: None,
        is_silent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._module: Any = module
        self._block = block
        self._is_silent = is_silent
        self._records: dict[tuple[str, int], Record] = {}
        self._times: Counter[str] = Counter()
        self._now: dict[str, tuple[Any, int, dict[str, Any]]] = {}  # of this microbatch: value, batch_size, options
        self._step = ""
        self._before: Any = None

    @contextmanager
    def holding(self, step: str = "") -> Iterator[None]:
        """Hold every ``log`` and ``log_dict`` inside, which come from the step of this name; refuse other ways."""
        self._records = {}
        self._times.clear()
        self._step = step
        if not isinstance(self._module, pl.LightningModule):  # a network of a loop of Fabric's logs nothing
            yield
            return
        self._before = self._module.__dict__.get("log")
        self._module.__dict__["log"] = self._hold
        try:
            with logging_by(self._module, _refuse_other_ways):
                yield
        finally:
            del self._module.__dict__["log"]
            if self._before is not None:
                self._module.__dict__["log"] = self._before

    def begin_microbatch(self) -> None:
        """A forward or backward begins: what it logs several times by one name is combined by the order of calls."""
        self._times.clear()
        self._now.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, steps run for a check, and nothing that they log is held."""
        held, self._records = self._records, {}
        try:
            yield
        finally:
            self._records = held

    def latest(self) -> dict[str, Given]:
        """What the microbatch has logged, by name; of a metric its value for the step, if that is logged."""
        found = {}
        for name, (value, size, options) in self._now.items():
            if not isinstance(value, LoggedMetric):
                found[name] = Given(torch.as_tensor(value).reshape(()), size, _reduction(options))
            elif value.of_step is not None and value.of_step.numel() == 1 and self._is_of_step(options):
                found[name] = Given(value.of_step.reshape(()), by=self._by(value.path))
        return found

    def _is_of_step(self, options: dict[str, Any]) -> bool:
        """Whether a log has a value for the step; by default it has one in training."""
        on_step = options.get("on_step")
        return bool(self._step == "training_step" if on_step is None else on_step)

    def combined(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return ``(name, value, options)`` of each log, in the order of first calls."""
        combined = []
        for record in self._records.values():
            options = dict(record.options)
            if len(record.batch_sizes) == len(record.values):  # else of some only: Lightning counts the batch
                options["batch_size"] = sum(record.batch_sizes)
            combined.append((record.name, self._combine(record), options))
        return combined

    def emit(self, combined: list[tuple[str, Any, dict[str, Any]]]) -> None:
        """Log what the last stage combined, through the user's own ``log`` where there is one."""
        for name, value, options in combined:
            self._users()(name, self._own(value) if isinstance(value, LoggedMetric) else value, **options)

    def _users(self) -> Callable[..., Any]:
        """The module's own ``log``: a method of its class, or an attribute of the object."""
        on_object = self._module.__dict__.get("log")
        if on_object == self._hold:
            on_object = self._before
        return on_object or MethodType(type(self._module).log, self._module)

    def _hold(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        options = {**(dict(zip(_further_arguments(self._users()), args)) if args else {}), **kwargs}
        if (block := self._block()) is not None:
            raise StepError(
                f"self.log({name!r}, …) is called by {block}, which runs on its own pipeline stage only."
                " Keep the value as an attribute of the block (or return it), and log it in the step,"
                " after the network; or use pipeline_parallel_size=1.",
                breaks=5,
            )
        refuse(value, f"self.log({name!r}, …)")
        if self._is_silent():
            return
        if isinstance(value, Metric):
            value = LoggedMetric(self._path(name, value), value._forward_cache)
        elif not isinstance(value, (Number, Tensor)) or (isinstance(value, Tensor) and value.numel() != 1):
            raise StepError(
                f"self.log({name!r}, …) of a {type(value).__name__}: with several pipeline stages it is called once for"
                " each batch, with what the microbatches log, which must be numbers or torchmetrics. Make a number of"
                " it before, or use pipeline_parallel_size=1.",
                breaks=5,
            )
        size = options.pop("batch_size", None)
        record = self._records.setdefault((name, self._times[name]), Record(name, options))
        self._times[name] += 1
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():  # not an operation of the step, which earlier stages run too
                value = value.detach().clone()
        record.values.append(value)
        if size is not None:
            record.batch_sizes.append(int(size))
        self._now[name] = record.values[-1], 1 if size is None else int(size), options

    def _combine(self, record: Record) -> Any:
        last = record.values[-1]
        if isinstance(last, LoggedMetric):
            of_step = [value.of_step.float() for value in record.values if value.of_step is not None]
            reduce = _REDUCTIONS[self._by(last.path)]
            return LoggedMetric(last.path, reduce(torch.stack(of_step), 0) if of_step else None)
        if len(record.values) == 1:
            return last
        values = _together(record.values, self._module.device)
        by = _reduction(record.options)
        if by == "sum":
            return values.sum().to(torch.get_default_dtype())
        mean = _REDUCTIONS.get(by, torch.mean)(values, 0)
        if by == "mean" and len(record.batch_sizes) == len(values):
            counted = [value * size for value, size in zip(values, record.batch_sizes) if size]
            if counted:  # with only empty parts, each has the value of an empty set, as one process would
                mean = torch.stack(counted).sum() / sum(record.batch_sizes)
        return mean if isinstance(last, Tensor) and last.dtype == torch.float64 else mean.to(torch.float32)

    def _by(self, path: str) -> str:
        """How a metric's value of a batch is made from its microbatches'."""
        metric = self._module.get_submodule(path)
        return next((by for kind, by in _OF_AGGREGATORS.items() if isinstance(metric, kind)), "mean")

    def _own(self, logged: LoggedMetric) -> Metric:
        metric: Any = self._module.get_submodule(logged.path)
        metric._forward_cache = logged.of_step  # what Lightning logs for the step; set by Metric.forward
        return metric

    def _path(self, name: str, metric: Metric) -> str:
        for path, module in self._module.named_modules():
            if module is metric:
                return path
        raise StepError(
            f"self.log({name!r}, …) of a Metric that is no attribute of the LightningModule: make it one.", breaks=5
        )


def _refuse_other_ways(_: str, name: str, *__: Any, **___: Any) -> None:
    raise StepError(
        f"{name!r} is logged through a stored reference to self.log (self.say = self.log, or log = self.log passed to a"
        " helper): with pipeline stages each microbatch would be logged by itself. Call"
        " self.log(…) directly (pass the module instead), or use pipeline_parallel_size=1.",
        breaks=5,
    )


def _further_arguments(log: Callable[..., Any]) -> Sequence[str]:
    """The names of ``log``'s parameters after name and value."""
    further = list(inspect.signature(log).parameters.values())[2:]
    if any(each.kind is each.VAR_POSITIONAL for each in further):
        return _POSITIONAL
    return [each.name for each in further]


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}
_OF_AGGREGATORS = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


def _together(values: list[Any], elsewhere: torch.device) -> Tensor:
    """Stack numbers as float64, on the device of the first that is on one; no device is waited for."""
    device = next((value.device for value in values if isinstance(value, Tensor)), elsewhere)
    return torch.stack(
        [
            value.to(device=device, dtype=torch.float64).reshape(())
            if isinstance(value, Tensor)
            else torch.full((), float(value), dtype=torch.float64, device=device)
            for value in values
        ]
    )


def _reduction(options: dict[str, Any]) -> str:
    """``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or another name, which Lightning refuses."""
    given = options.get("reduce_fx", "mean")
    name = str(getattr(given, "__name__", given)).lower()
    return {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)
