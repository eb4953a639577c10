"""Warns of logs that are no mean over samples: a perplexity, an RMSE, a deviation, a maximum.

On stages a log is the mean of what the microbatches log. For ``loss.exp()`` that isn't what one process logs,
``exp`` of the batch's mean, and nothing fails. So in the first step of each kind such functions of scalars are noted,
and functions other than means and sums that make a scalar of many values.

Limits: Python's own functions (``math.exp(loss.item())``), and quotients, such as an F1 score of counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NONLINEAR = {
    *("exp", "exp2", "expm1", "log", "log10", "log2", "log1p", "sqrt", "rsqrt", "square", "reciprocal"),
    *("pow", "__pow__", "__rpow__", "__rtruediv__", "__rdiv__"),
}
_OF_MANY = {
    *("std", "var", "std_mean", "var_mean", "max", "amax", "min", "amin", "median", "nanmedian", "quantile"),
    *("nanquantile", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "logsumexp", "prod"),
}
_NOTED = "_lightning_shard_function"


class _Notes(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and result.ndim == 0:
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
        return result


@contextmanager
def noting_functions_of_means() -> Iterator[None]:
    """Context of a step whose scalars are noted for :func:`function_of_mean`."""
    with _Notes():
        yield


def function_of_mean(value: object) -> str | None:
    """What a noted step has computed the value with that isn't linear, if anything."""
    return getattr(value, _NOTED, None)


def text(name: str, function: str) -> str:
    """The warning about a log."""
    return (
        f"self.log({name!r}, …) logs {function} of each microbatch. With several pipeline stages the log is the mean of"
        " that, which isn't that of the batch. Log what it is computed from, means over samples, and compute it in"
        " on_train_batch_end or on_train_epoch_end (on_validation_…) of these; or log a torchmetrics.Metric."
    )


def differ(values: list[Any]) -> bool:
    """Whether microbatches logged different values, as a learned temperature's aren't. Waits for the device."""
    return any(not torch.equal(torch.as_tensor(value), torch.as_tensor(values[0])) for value in values)
