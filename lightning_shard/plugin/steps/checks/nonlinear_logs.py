"""Warns of logs that are no mean over samples: a perplexity, an RMSE, a deviation, a maximum.

On stages a log is the mean of what the microbatches log. For ``loss.exp()`` that isn't what one process logs,
``exp`` of the batch's mean, and nothing fails. So in the first step of each kind, in the microbatch that is traced
anyway, such functions of scalars are noted, and functions other than means and sums that make a scalar of many values.

Limits: Python's own functions (``math.exp(loss.item())``), quotients, such as an F1 score of counts, and what is
computed inside of a part with parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import WHOLE_BATCHES
from lightning_shard.pipeline.dataflow.trace import observing

_NONLINEAR = {
    *("exp", "exp2", "expm1", "log", "log10", "log2", "log1p", "sqrt", "rsqrt", "square", "reciprocal"),
    *("pow", "__pow__", "__rpow__", "__rtruediv__", "__rdiv__"),
}
_OF_MANY = {
    *("std", "var", "std_mean", "var_mean", "max", "amax", "min", "amin", "median", "nanmedian", "quantile"),
    *("nanquantile", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "prod"),
}
_NOTED = "_lightning_shard_function"


def noting_functions_of_means() -> AbstractContextManager[None]:
    """Context of a step whose scalars are noted for :func:`function_of_mean`, where its operations are traced."""
    return observing(_note)


def _note(func: Any, args: Sequence[Any], result: Any) -> None:
    if type(result) is not Tensor or result.ndim:
        return
    scalars = [each for each in args if isinstance(each, Tensor) and each.ndim == 0]
    name = getattr(func, "__name__", "")
    if name in _NONLINEAR and scalars:
        noted: str | None = f"{name.strip('_')} of a number"
    elif name in _OF_MANY and not scalars:
        noted = f"{name} over the values"
    else:
        noted = next(filter(None, map(function_of_mean, scalars)), None)
    if noted:
        setattr(result, _NOTED, noted)


def function_of_mean(value: object) -> str | None:
    """What a noted step has computed the value with that isn't linear, if anything."""
    return getattr(value, _NOTED, None)


def text(name: str, function: str) -> str:
    """The warning about a log."""
    return (
        f"self.log({name!r}, …) logs {function} of each microbatch. With several pipeline stages the log is the mean of"
        " that, which isn't that of the batch. Log what it is computed from, means over samples, and compute it in"
        " on_train_batch_end or on_train_epoch_end (on_validation_…) of these; or log a torchmetrics.Metric, or"
        f" use {WHOLE_BATCHES}."
    )


def differ(values: list[Any]) -> bool:
    """Whether microbatches logged different values, as a learned temperature's aren't. Waits for the device."""
    return any(not torch.equal(torch.as_tensor(value), torch.as_tensor(values[0])) for value in values)
