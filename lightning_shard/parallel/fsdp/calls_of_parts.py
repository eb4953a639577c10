"""All-gather a unit for a call of a part of it, such as ``self.blocks[0].norm.embed(t)`` in a step.

FSDP2 all-gathers a unit for its own calls only. Hooks on all its parts would cost time in each call, so the first step
of each kind finds those that are called by themselves, and only these keep hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.parallel.compiled_blocks import is_compiled
from lightning_shard.parallel.fsdp.units import (
    call_fsdp,
    gather_for_backward,
    groups_of,
    is_unit,
    set_up,
    sharded_units,
)
from lightning_shard.parallel.fsdp.watched_parameters import check_before_gather

_FOUND: WeakSet[nn.Module] = WeakSet()
"""Parts with hooks."""


@contextmanager
def finding_calls_of_parts(root: nn.Module) -> Iterator[None]:
    """Context of a step: parts of units below ``root`` that are called by themselves will always gather their unit."""
    outermost: dict[nn.Module, nn.Module] = {}
    with ExitStack() as hooks:
        for unit in sharded_units(root):
            for module in unit.modules():
                outermost.setdefault(module, unit)
            if unit is not root:
                for part in _parts(unit):
                    found = partial(_gather_from_now_on, unit, outermost[part])
                    hooks.callback(part.register_forward_pre_hook(found, prepend=True).remove)
        yield


def _parts(unit: Any) -> Iterator[nn.Module]:
    """The modules in a unit that have parameters of it; not those of units in it, nor what is compiled."""
    for child in () if is_compiled(unit) else unit.children():
        if not is_unit(child) and any(True for _ in child.parameters()):
            yield child
            yield from _parts(child)


def _gather_from_now_on(unit: nn.Module, outermost: Any, part: nn.Module, args: Any) -> None:
    if part in _FOUND:
        return
    set_up(outermost)
    if _is_sharded(unit):
        _FOUND.add(part)
        calls = _Calls(unit)
        part.register_forward_pre_hook(calls.enter, prepend=True)
        part.register_forward_hook(calls.leave, always_call=True)
        calls.enter()  # of this call, for which the new hook is too late


def _is_sharded(unit: nn.Module) -> bool:
    return any(group.is_sharded for group in groups_of(unit))


class _Calls:
    """The calls of one part."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._gathers: list[bool] = []

    def enter(self, *_: Any) -> None:
        self._gathers.append(_is_sharded(self._unit))
        if self._gathers[-1]:
            check_before_gather(self._unit)
            call_fsdp(self._unit, FSDPModule.unshard)

    def leave(self, _: nn.Module, args: Any, output: Any) -> None:
        if self._gathers and self._gathers.pop():
            gather_for_backward(self._unit, args, output)
            call_fsdp(self._unit, FSDPModule.reshard)
