"""Warns of logs that are no mean over samples: a perplexity, an RMSE, a deviation, a maximum, a sum.

On stages a log is the mean of what the microbatches log. For ``loss.exp()`` that isn't what one process logs,
``exp`` of the batch's mean, and nothing fails. So in the first step of each kind, in the microbatch that is traced
anyway, such functions of scalars are noted; functions other than means that make a scalar of many values; and sums over
samples, which are no longer noted when they are multiplied or divided.

Limits: Python's own functions and numbers (``math.exp(loss.item())``, ``float(len(x))``), quotients, such as an F1
score of counts, and what is computed inside of a part with parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
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
_SUM = "a sum over samples"
_SUMS = {"sum", "nansum", "count_nonzero"}
_KEEP_SUMS = {
    *("float", "double", "half", "bfloat16", "to", "type", "cpu", "cuda"),
    *("detach", "clone", "squeeze", "reshape", "view", "add", "__add__", "__radd__"),
}
_NOTED = "_lightning_shard_function"
_OF_PARAMETERS = "_lightning_shard_of_parameters"
_JOINED = "_lightning_shard_joined"
"""Set on stacks of numbers, such as the losses of several tasks, and what is computed of each."""


def noting_functions_of_means(samples: int) -> AbstractContextManager[None]:
    """Context of a step whose scalars are noted for :func:`function_of_mean`, where its operations are traced.

    Args:
        samples: As many are in a microbatch.
    """
    return observing(partial(_note, samples))


def _note(samples: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
    if type(result) is not Tensor:
        return
    name = getattr(func, "__name__", "")
    given = tree.tensors(args)
    if given and all(isinstance(each, nn.Parameter) or getattr(each, _OF_PARAMETERS, False) is True for each in given):
        setattr(result, _OF_PARAMETERS, True)  # the same in all microbatches
        return
    if result.ndim:
        if name == "stack" or any(_is_joined(each) and each.shape == result.shape for each in args):
            setattr(result, _JOINED, True)
        return
    scalars = [each for each in args if isinstance(each, Tensor) and each.ndim == 0]
    if name in _NONLINEAR:
        noted: str | None = f"{name.strip('_')} of a number"
    elif name in _OF_MANY and not scalars:
        noted = f"{name} over the values"
    elif (name in _SUMS or kwargs.get("reduction") == "sum") and _is_of_samples(args, samples):
        noted = _SUM
    else:
        noted = next(filter(None, map(function_of_mean, scalars)), None)
        if noted == _SUM and name not in _KEEP_SUMS:
            noted = None
    if noted:
        setattr(result, _NOTED, noted)


def _is_of_samples(args: Sequence[Any], samples: int) -> bool:
    of = args[0] if args else None
    if not isinstance(of, Tensor) or isinstance(of, nn.Parameter) or not of.ndim or _is_joined(of):
        return False
    return bool(of.size(0)) and of.size(0) % samples == 0


def _is_joined(value: Any) -> bool:
    return getattr(value, _JOINED, False) is True


def function_of_mean(value: object) -> str | None:
    """What a noted step has computed the value with that isn't linear, if anything."""
    return getattr(value, _NOTED, None)


def text(name: str, function: str) -> str:
    """The warning about a log."""
    return (
        f"self.log({name!r}, …) logs {function} of each microbatch. With several pipeline stages the log is the mean of"
        " that, which isn't that of the batch. For a mean over a number that varies, as of tokens, give"
        " batch_size=that number. Else log what it is computed from, means over samples, and compute it in"
        " on_train_batch_end or on_train_epoch_end (on_validation_…) of these; or log a torchmetrics.Metric, or"
        f" use {WHOLE_BATCHES}."
    )


def text_of_metric(name: str, *, adds_up: bool) -> str:
    """The warning about a metric's values of steps.

    Args:
        adds_up: Whether its values are added up.
    """
    what, remedy = "mean", "Its value of the epoch is right: log it with on_step=False, on_epoch=True"
    if adds_up:
        what, remedy = "sum", "Give it sums over samples"
    return (
        f"self.log({name!r}, …) of a torchmetrics.Metric: with several pipeline stages its value of a step is the"
        f" {what} of its values of the microbatches, which isn't that of the batch. {remedy}, or use {WHOLE_BATCHES}."
    )


def is_another(function: str, values: list[Any]) -> bool:
    """Whether the mean of microbatches' values isn't the batch's value, as a learned temperature's is. Waits for the
    device.
    """
    if function == _SUM:
        return any(bool(torch.as_tensor(value)) for value in values)
    return any(not torch.equal(torch.as_tensor(value), torch.as_tensor(values[0])) for value in values)
