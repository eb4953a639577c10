"""``self.log`` inside a pipelined step: held back per microbatch, then said once on every stage.

Only the last stage sees losses and metrics. What it logged for each microbatch is combined as the user asked
(``reduce_fx``), sent to all stages and logged there once, so progress bars, monitors, early stopping and schedulers
agree on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_shard.errors import StepError
from lightning_shard.pipeline.taint import refuse


@dataclass
class Record:
    """One ``self.log`` call of the step, over all microbatches."""

    name: str
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoggedMetric:
    """A logged torchmetrics Metric: where the module holds it, and its value for the step (the microbatches' mean)."""

    path: str
    of_step: Tensor | None


class HeldLogs:
    """Stands in for a module's ``log`` during a step."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._records: dict[str, Record] = {}

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold back every ``log`` and ``log_dict`` inside."""
        self._records = {}
        self._module.__dict__["log"] = self._hold
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def remember(self) -> Callable[[], None]:
        """What was held back so far; returns what forgets the rest."""
        held = {name: replace(r, values=[*r.values], batch_sizes=[*r.batch_sizes]) for name, r in self._records.items()}

        def put_back() -> None:
            self._records = {
                name: replace(r, values=[*r.values], batch_sizes=[*r.batch_sizes]) for name, r in held.items()
            }

        return put_back

    def combined(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """``(name, value, options)`` of each name in the order of first calls."""
        said = []
        for record in self._records.values():
            options = dict(record.options)
            if record.batch_sizes:
                options["batch_size"] = sum(record.batch_sizes)
            said.append((record.name, _combine(record), options))
        return said

    def say(self, said: list[tuple[str, Any, dict[str, Any]]]) -> None:
        """Log what the last stage combined."""
        for name, value, options in said:
            self._module.log(name, self._own(value) if isinstance(value, LoggedMetric) else value, **options)

    def _hold(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        options = {**dict(zip(_POSITIONAL, args)), **kwargs}
        if isinstance(value, Metric):
            value = LoggedMetric(self._path(name, value), value._forward_cache)
        elif not isinstance(value, (Number, Tensor)):
            raise StepError(
                f"self.log({name!r}, …) takes a number, a tensor or a Metric, not a {type(value).__name__}."
            )
        refuse(value, f"self.log({name!r}, …)")
        size = options.pop("batch_size", None)
        record = self._records.setdefault(name, Record(name, options))
        record.values.append(value.detach().clone() if isinstance(value, Tensor) else value)
        if size is not None:
            record.batch_sizes.append(int(size))

    def _own(self, logged: LoggedMetric) -> Metric:
        metric: Any = self._module.get_submodule(logged.path)
        metric._forward_cache = logged.of_step  # what Lightning logs for the step; set by Metric.forward
        return metric

    def _path(self, name: str, metric: Metric) -> str:
        for path, module in self._module.named_modules():
            if module is metric:
                return path
        raise StepError(f"self.log({name!r}, …) of a Metric that is no attribute of the LightningModule: make it one.")


_POSITIONAL = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")


def _combine(record: Record) -> Any:
    last = record.values[-1]
    if isinstance(last, LoggedMetric):
        of_step = [value.of_step for value in record.values if value.of_step is not None]
        return LoggedMetric(last.path, torch.stack([v.cpu().float() for v in of_step]).mean(0) if of_step else None)
    values = torch.stack([torch.as_tensor(value, dtype=torch.float64).cpu().reshape(()) for value in record.values])
    reduce = record.options.get("reduce_fx", "mean")
    kind = getattr(reduce, "__name__", reduce)
    if kind in ("mean", "avg"):
        if len(record.batch_sizes) == len(values):
            weights = torch.tensor(record.batch_sizes, dtype=torch.float64)
            combined = (values * weights).sum() / weights.sum()
        else:
            combined = values.mean()
    elif kind in ("sum", "min", "max", "amin", "amax"):
        combined = getattr(values, {"amin": "min", "amax": "max"}.get(kind, kind))()
    else:
        combined = reduce(values)
    return combined.to(torch.float32)
