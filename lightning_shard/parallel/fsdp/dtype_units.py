"""Divide units with parameters of several dtypes: FSDP2 all-gathers a unit in one buffer, and so in one dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.containers import called_below


def of_one_dtype(
    units: Iterable[nn.Module], root: nn.Module | None, besides: Collection[nn.Parameter]
) -> Iterator[nn.Module]:
    """The units, each preceded by the modules inside of it that become units of their own, as their dtype differs.

    Args:
        units: Modules that are called.
        root: The module that holds the units; modules of another dtype outside of the units are yielded too.
        besides: Parameters that belong to no unit.

    Raises:
        ConfigurationError: One module holds parameters of several dtypes.
    """
    units = list(units)
    found = [part for unit in units for part in (*_inside(unit, set(besides)), unit)]
    if root is not None:
        found += _inside(root, {*besides, *(p for unit in units for p in unit.parameters())})
    yield from dict.fromkeys(found)  # units may share a module of another dtype


def _inside(unit: nn.Module, besides: set[nn.Parameter], dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """The modules in a unit of ``dtype`` that become units of their own, innermost first.

    Without ``dtype``, a unit has the dtype of its own parameters, or else of most of the elements in it.
    """
    counts = Counter[torch.dtype]()
    for parameter in unit.parameters():
        if parameter not in besides:
            counts[parameter.dtype] += parameter.numel()
    dtype = dtype or _own(unit, besides) or max(counts, key=counts.__getitem__, default=None)
    if not counts.keys() - {dtype}:
        return
    for part in called_below(unit):
        own = _own(part, besides)
        if own is None or own == dtype:
            yield from _inside(part, besides, dtype)
        else:
            yield from _inside(part, besides, own)
            yield part


def _own(module: nn.Module, besides: set[nn.Parameter]) -> torch.dtype | None:
    """The dtype of the parameters that a module holds itself."""
    held = {p.dtype: name for name, p in module.named_parameters(recurse=False) if p not in besides}
    if len(held) > 1:
        shown = ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for dtype, name in held.items())
        raise ConfigurationError(
            f"A {type(module).__name__} holds parameters of several types, which can't be sharded together: {shown}."
            " Put those of each type into a module that is called."
        )
    return next(iter(held), None)
