"""Detects steps that change a parameter in place: a gathered parameter is a copy, so the change would be lost.

A momentum encoder or a codebook that is updated in a step would silently keep its old values. So in the first step of
each kind, each FSDP unit's parameters are compared right after they are gathered and right before they are freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.units import is_unit
from lightning_shard.parallel.fsdp.unsharded import unsharded_of

Sums = dict[str, tuple[torch.Size, Tensor]]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums(root: nn.Module) -> Sums:
    """For each whole parameter here that has dimensions: its shape, and the sum of its elements' bits as integers."""
    found = {}
    with torch.no_grad(), _uncounted():
        for name, parameter in nn.Module.named_parameters(root):
            if type(parameter) is nn.Parameter and parameter.ndim and parameter.element_size() in _INTEGERS:
                bits = parameter.detach().contiguous().view(_INTEGERS[parameter.element_size()])
                found[name] = (parameter.shape, bits.sum(dtype=torch.int64))
    return found


def changed(before: Sums, now: Sums) -> str | None:
    """The first parameter that is in both and differs."""
    both = ((name, held, now[name]) for name, held in before.items() if name in now)
    with _uncounted():
        return next((name for name, held, found in both if held[0] == found[0] and bool(held[1] != found[1])), None)


def _uncounted() -> AbstractContextManager[Any]:
    """Context that goes around torch functions: they name operations by counting, and stages hold other parameters."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


@contextmanager
def refusing_lost_changes(root: nn.Module) -> Iterator[None]:
    """Check the steps that run inside, each in a call of ``root``.

    Raises:
        StepError: A step changes a gathered parameter.
    """
    units = {name for name, module in root.named_modules() if is_unit(module)}
    if unsharded_of(root) is not None:  # kept there, but made once per microbatch, and lost on other layouts
        units.add("")
    with ExitStack() as stack:
        for name in units:
            unit = root.get_submodule(name)
            before: list[Sums] = []
            # after the hooks that gather, and before those that reshard
            stack.callback(unit.register_forward_pre_hook(partial(_begins, before)).remove)
            stack.callback(unit.register_forward_hook(partial(_ends, name, before), prepend=True).remove)
        yield


def _begins(before: list[Sums], unit: nn.Module, *_: Any) -> None:
    before.append(sums(unit))  # a module may call itself


def _ends(unit_name: str, before: list[Sums], unit: nn.Module, *_: Any) -> None:
    if not before:  # it ran in another stage of this rank; the hooks are called on this one too
        return
    name = changed(before.pop(), sums(unit))
    if name is not None:
        raise StepError(
            f"The step changes the parameter {unit_name}{'.' * bool(unit_name)}{name} in place. While it runs,"
            " parameters are gathered from the ranks that hold them, and the change is lost: make it in"
            " on_train_batch_start or on_train_batch_end, where each rank has its own part, or keep it as a buffer."
        )
