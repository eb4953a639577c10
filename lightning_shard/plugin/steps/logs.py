"""Collects ``self.log`` calls of a pipelined step per microbatch, combines them, and logs once on every stage.

Only the last stage sees losses and metrics. What it logged for each microbatch is combined into what it would have
logged for the whole batch, sent to all stages and logged there once. So progress bars, monitors, early stopping and
schedulers agree on all ranks.

- A float with ``reduce_fx="mean"`` is taken as a mean over samples, as the loss is: averaged, weighted by
  ``batch_size`` where that is given.
- An integer with ``reduce_fx="sum"`` is taken as a count of samples, tokens or the like: added up, with one warning.
- Anything else may be one number per batch or an amount of its samples, which can't be told apart. It is refused,
  unless the batch is a single microbatch.
- What a block logs runs on the block's stage only, so on an earlier stage it would be lost: it is refused there. So is
  what hooks inside of a block compute and log.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Integral, Number
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
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


InBlock = tuple[str, str]
"""A block's name, and the name of what is logged in a call of it."""


class HeldLogs:
    """Replaces a module's ``log`` during a step, and holds the records.

    Args:
        block: Returns the block that is being called, and whether the last stage calls it.
    """

    def __init__(self, module: nn.Module, block: Callable[[], tuple[str, bool] | None] = lambda: None) -> None:
        self._module: Any = module
        self._block = block
        self._in_blocks: dict[bool, set[InBlock]] = {False: set(), True: set()}
        self._records: dict[tuple[str, int], Record] = {}
        self._times: Counter[str] = Counter()
        self._now: dict[str, tuple[Any, int, dict[str, Any]]] = {}  # of this microbatch: value, batch_size, options
        self._step = ""
        self._microbatches = 1
        self._warned_of_sums: set[str] = set()
        self._before: Any = None

    @contextmanager
    def holding(self, microbatches: int, step: str = "") -> Iterator[None]:
        """Hold every ``log`` and ``log_dict`` inside, which come from ``microbatches`` calls of the step of this name.

        Raises:
            StepError: Code inside logs in another way.
        """
        self._records = {}
        self._times.clear()
        self._in_blocks = {False: set(), True: set()}
        self._microbatches = microbatches
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
        """A forward or backward begins: what is logged in it several times by one name is several logs.

        These are combined by their order.
        """
        self._times.clear()
        self._now.clear()

    def remember(self) -> Callable[[], None]:
        """Snapshot the records held so far; returns a function that restores them."""
        held, now = _copied(self._records), dict(self._now)

        def put_back() -> None:
            self._records, self._now = _copied(held), dict(now)

        return put_back

    def latest(self) -> dict[str, Given]:
        """What the microbatch has logged, by name; of a metric its value for the step, if that is logged."""
        found = {}
        for name, (value, size, options) in self._now.items():
            if not isinstance(value, LoggedMetric):
                found[name] = Given(torch.as_tensor(value).reshape(()), size, _reduction(options) == "sum")
            elif value.of_step is not None and value.of_step.numel() == 1 and self._is_of_step(options):
                reduce = self._reduce(value.path)
                if reduce in (torch.mean, torch.sum):
                    found[name] = Given(value.of_step.reshape(()), adds_up=reduce is torch.sum, is_metrics=True)
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

    def in_blocks(self, *, of_last: bool) -> set[InBlock]:
        """What was logged in calls of blocks, stand-ins included: on the last stage, or on earlier ones."""
        return self._in_blocks[of_last]

    def emit(self, combined: list[tuple[str, Any, dict[str, Any]]]) -> None:
        """Log what the last stage combined, through the user's own ``log`` where there is one."""
        for name, value, options in combined:
            metric = isinstance(value, LoggedMetric)
            if not metric and self._microbatches > 1 and _reduction(options) == "sum":
                self._warn_of_sum(name)
            self._users()(name, self._own(value) if metric else value, **options)

    def _users(self) -> Callable[..., Any]:
        """The module's own ``log``: a method of its class, or an attribute of the object."""
        on_object = self._module.__dict__.get("log")
        if on_object == self._hold:
            on_object = self._before
        return on_object or MethodType(type(self._module).log, self._module)

    def _warn_of_sum(self, name: str) -> None:
        if name not in self._warned_of_sums:
            self._warned_of_sums.add(name)
            rank_zero_warn(
                f"self.log({name!r}, …, reduce_fx='sum') adds up what the microbatches log: right for a count of"
                " samples or tokens, not for one number per batch."
            )

    def _hold(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        options = {**(dict(zip(_further_arguments(self._users()), args)) if args else {}), **kwargs}
        if (in_block := self._block()) is not None:
            block, of_last = in_block
            self._in_blocks[of_last].add((block, name))
        refuse(value, f"self.log({name!r}, …)")
        if isinstance(value, Metric):
            value = LoggedMetric(self._path(name, value), value._forward_cache)
        elif not isinstance(value, (Number, Tensor)) or (isinstance(value, Tensor) and value.numel() != 1):
            if getattr(self._users(), "__func__", None) is not pl.LightningModule.log:
                raise StepError(
                    f"self.log({name!r}, …) of a {type(value).__name__} by a log of the user's own: with several"
                    " pipeline stages it is called once for each batch, with what the microbatches log, which must be"
                    " numbers or torchmetrics. Make a number of it before, or use pipeline_parallel_size=1.",
                    breaks=5,
                )
            type(self._module).log(self._module, name, value, *args, **kwargs)  # raises, naming what can be logged
            return
        size = options.pop("batch_size", None)
        record = self._records.setdefault((name, self._times[name]), Record(name, options))
        self._times[name] += 1
        if self._microbatches > 1 and not isinstance(value, LoggedMetric):
            _check_combinable(record, value)
        record.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        if size is not None:
            record.batch_sizes.append(int(size))
        self._now[name] = record.values[-1], 1 if size is None else int(size), options

    def _combine(self, record: Record) -> Any:
        last = record.values[-1]
        if isinstance(last, LoggedMetric):
            of_step = [value.of_step.float() for value in record.values if value.of_step is not None]
            return LoggedMetric(last.path, self._reduce(last.path)(torch.stack(of_step), 0) if of_step else None)
        if len(record.values) == 1:
            return last
        values = _together(record.values, self._module.device)
        if _reduction(record.options) == "sum":
            return values.sum().to(torch.get_default_dtype())
        mean = values.mean()
        if len(record.batch_sizes) == len(values):
            counted = [value * size for value, size in zip(values, record.batch_sizes) if size]
            if counted:  # with only empty parts, each has the value of an empty set, as one process would
                mean = torch.stack(counted).sum() / sum(record.batch_sizes)
        return mean if isinstance(last, Tensor) and last.dtype == torch.float64 else mean.to(torch.float32)

    def _reduce(self, path: str) -> Any:
        """What makes a metric's value of a batch from its microbatches'."""
        metric = self._module.get_submodule(path)
        return next((by for kind, by in _OF_AGGREGATORS.items() if isinstance(metric, kind)), torch.mean)

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


def check_logged_by_last_stage(in_blocks: set[InBlock], logged_last: set[InBlock]) -> None:
    """Check that what earlier stages' blocks log is logged on the last stage too.

    Raises:
        StepError: It isn't; names the block.
    """
    for block, name in sorted(in_blocks - logged_last):
        raise StepError(
            f"self.log({name!r}, …) is called by {block}, on an earlier pipeline stage, but only the last stage logs."
            " Keep the value as an attribute of the block (or return it), and log it in the step,"
            " after the network; or use pipeline_parallel_size=1.",
            breaks=5,
        )


_OF_AGGREGATORS = {SumMetric: torch.sum, MaxMetric: torch.amax, MinMetric: torch.amin}
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


def _copied(records: dict[tuple[str, int], Record]) -> dict[tuple[str, int], Record]:
    return {key: replace(r, values=[*r.values], batch_sizes=[*r.batch_sizes]) for key, r in records.items()}


def _reduction(options: dict[str, Any]) -> str:
    """``"mean"``, ``"sum"``, ``"min"``, ``"max"``, or another name, which Lightning refuses."""
    given = options.get("reduce_fx", "mean")
    name = str(getattr(given, "__name__", given)).lower()
    return {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)


def _check_combinable(record: Record, value: Number | Tensor) -> None:
    reduction = _reduction(record.options)
    if record.name in _AXES and reduction == "mean":
        return
    if reduction == ("sum" if _is_integer(value) else "mean") or reduction not in _REMEDIES:
        return
    raise StepError(
        f"self.log({record.name!r}, …, reduce_fx={reduction!r}) of the {type(value).__name__} {value} is called once"
        f" for each microbatch, and these values can't be combined to the batch's. {_REMEDIES[reduction]} For one"
        " number per batch, return what it needs from the step and log it in on_train_batch_end"
        " (on_validation_batch_end, …); or use microbatches=1 or pipeline_parallel_size=1.",
        breaks=5,
    )


_AXES = ("step", "epoch")
"""By these names loggers are told where a log stands, as by ``self.log("step", self.current_epoch)``."""
_REMEDIES = {
    "mean": 'If it counts samples, log it with reduce_fx="sum"; if it is the same for all, log float(…) of it.',
    "sum": "If it counts samples, log it as an integer; if it is a sum over them, log a torchmetrics.SumMetric.",
    "min": "For the least of all samples, log a torchmetrics.MinMetric.",
    "max": "For the largest of all samples, log a torchmetrics.MaxMetric.",
}


def _is_integer(value: Number | Tensor) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, Integral)
