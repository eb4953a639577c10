"""What a module keeps in numbers and tensors: counters, statistics, losses, hidden states; and whether it counts twice.

Lists aren't looked at, to which steps append, nor metrics and BatchNorm: how their states add up is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.state.walk import children, reachable

_ROUNDING = 1e-6
"""Of numbers and sums, relative."""
_LARGEST = 2**24
"""Elements of a tensor that is looked at: statistics are small, larger tensors are data."""


@torch.no_grad()
def numbers_kept(module: nn.Module) -> dict[str, Any]:
    """The numbers that a module, what it holds, and globals keep; of tensors and arrays of floats shape, sum and norm.

    Version counters don't show changes made through ``.data``, and arrays have none.
    """
    norms, found = {id(part) for part in batch_norms(module).values()}, [*reachable(module)]
    known = tuple(f"{path}." for path, part in found if isinstance(part, Metric) or id(part) in norms)
    lists = {path for path, part in found if isinstance(part, Sequence)}
    kept: dict[str, Any] = {}
    for path, value in found:
        if path in lists or path.rpartition(".")[0] in lists or f"{path}.".startswith(known):
            continue
        if isinstance(value, (Tensor, np.ndarray)):
            if (sums := _sums(value)) is not None:
                kept[path.replace("_buffers.", "")] = sums
            continue
        for key, number in children(value):
            if type(number) in (int, float):
                kept[".".join(filter(None, (path, str(key))))] = number
    return kept


def _sums(value: Any) -> tuple[Any, ...] | None:
    if isinstance(value, np.ndarray):
        value = torch.tensor(value) if value.dtype in (np.float32, np.float64) else None
    if type(value) is not Tensor or not value.is_floating_point() or value.layout is not torch.strided:
        return None
    if value.is_meta or value.requires_grad or value.numel() > _LARGEST:
        return None
    wide = value.double().nan_to_num()
    return value.shape, *torch.stack([wide.sum(), wide.norm()]).tolist()


def left_otherwise(
    begin: Mapping[str, Any], first: Mapping[str, Any], both: Mapping[str, Any], whole: Mapping[str, Any]
) -> Iterator[str]:
    """The names of what two microbatches change, and leave otherwise than both as one.

    What a step makes anew with the same values, such as a table for its shapes, isn't changed.

    Args:
        begin: What was kept before.
        first: What the first microbatch has left.
        both: What the second one has left, after it.
        whole: What both as one leave, from the beginning.
    """
    for name in first.keys() & both.keys() & whole.keys():
        is_as_before = _are_same(begin.get(name), first[name]) and _are_same(first[name], both[name])
        if not is_as_before and not _are_same(both[name], whole[name]):
            yield name


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] == other[0] and all(map(_are_same, one[1:], other[1:]))
    if isinstance(one, float) and isinstance(other, float):
        return repr(one) == repr(other) or abs(one - other) <= _ROUNDING * max(abs(one), abs(other))  # NaN is NaN
    return repr(one) == repr(other)
