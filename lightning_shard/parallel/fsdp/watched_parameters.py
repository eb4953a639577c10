"""Checks that what users change of the parameters of FSDP2's units isn't lost.

A unit holds each parameter as two tensors. The shard is in the module between steps, and is what the optimizer trains.
The unsharded (all-gathered) parameter is in the module during a step; its memory is freed afterwards. What a user sets
on one must act on the other, and is refused if it would be lost. These checks run in each step, so they never wait for
a device.

Private (torch 2.11 to 2.14): of the states of parameters, the modules that hold them, and the memory they gather to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.data_writes import TAKEN, forget_data, show_writes, was_written
from lightning_shard.parallel.fsdp.units import groups_of, is_unit, remember_units, sharded_units


class _WatchedList(list["_Watched"]):
    """The groups to check in calls of one module. Only the module's hook owns the list.

    The list refers back to the module, so :data:`_WATCHED` has a weak reference to it.
    """


_WATCHED: WeakKeyDictionary[nn.Module, ref[_WatchedList]] = WeakKeyDictionary()


class _Parameter:
    """One parameter of a unit, with the modules and names that hold it.

    Attributes:
        held: FSDP2's state of it.
        local: Its shard, as FSDP2 gathers it.
        gathered: The unsharded parameter of the last all-gather, and the version that it had then.
    """

    __slots__ = ("gathered", "held", "local", "slots", "version")

    def __init__(self, held: Any) -> None:
        info = held._module_info
        self.held = held
        self.slots = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names)]
        self.local = held.sharded_param._local_tensor
        self.gathered: Any = None
        self.version = 0

    def error(self, what: str) -> StepError:
        module, name = self.slots[0]
        shape = tuple(self.held.sharded_param.shape)
        return StepError(f"The parameter {name!r} of a {type(module).__name__}, of shape {shape}, {what}")


class _Watched:
    """One of FSDP2's groups of parameters. Checked as a whole: a call in Python for each parameter takes longer."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._parameters = [*map(_Parameter, group.fsdp_params)]

    def before_gather(self) -> None:
        """Check before the all-gather for a step; take over a shard that was assigned by ``p.data = …``."""
        self.check_in_place()
        if self._group.is_sharded:
            for each in self._parameters:
                if each.held.sharded_param._local_tensor is not each.local:
                    each.held.reset_sharded_param()  # FSDP2 itself has still the old local tensor
                    each.local = each.held.sharded_param._local_tensor

    def after_gather(self) -> None:
        for each in self._parameters:
            gathered: Any = getattr(each.held, "_unsharded_param", None)
            if gathered is not each.gathered:
                each.gathered, each.version = gathered, gathered._version
                show_writes(gathered)

    def after_forward(self) -> None:
        """Check after the unit's forward, before the parameters are freed; take over ``requires_grad``."""
        if not self._group.is_unsharded:
            return
        self.check_in_place()
        self.check_unchanged()
        for each in self._parameters:
            sharded, gathered = each.held.sharded_param, each.gathered
            if sharded.requires_grad != gathered.requires_grad:
                sharded.requires_grad_(gathered.requires_grad)

    def check_unchanged(self) -> None:
        """Check that the gathered parameters, if there are any, were left as they were gathered."""
        is_unsharded, was_taken = self._group.is_unsharded, bool(TAKEN)
        for each in self._parameters:
            gathered = each.gathered
            if gathered is None:
                continue
            is_changed = gathered._version != each.version
            if is_unsharded:
                # after ``p.data = …`` in a step the parameter would keep that memory, and not be all-gathered again
                local = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
                outputs = each.held.all_gather_outputs
                is_changed |= len(outputs) == 1 and local.data_ptr() != outputs[0].data_ptr()
                is_changed |= was_taken and was_written(gathered)
            elif was_taken:
                forget_data(gathered)
            if is_changed:
                raise each.error(_LOST)

    def check_in_place(self) -> None:
        if _OTHERS_IN_PLACE.get():
            return
        is_sharded = self._group.is_sharded
        for each in self._parameters:
            expected = each.held.sharded_param if is_sharded else each.held._unsharded_param
            for module, name in each.slots:
                if module._parameters.get(name) is not expected:
                    raise each.error(_REPLACED)


_REPLACED = (
    "was replaced or removed after the module was sharded, but FSDP2 still gathers and trains the original: change its"
    " values in place, as by copy_, or replace it in __init__, configure_model or setup. torch.func.functional_call"
    " replaces parameters too, for one call: use it only for a module that isn't in a block, or use"
    " data_parallel_size=1."
)
_LOST = (
    "was changed in place while it was unsharded (all-gathered) for a step, and the change is lost when it is"
    " resharded: make it in on_train_batch_start or on_train_batch_end, where it is sharded, or keep it as a buffer."
)


def watch_parameters(root: nn.Module) -> None:
    """Register hooks: what is set on parameters, unsharded or not, acts in the next step at the latest, or is refused.

    Args:
        root: The model, after FSDP2 was applied to all its units. If ``root`` is a unit, a step is a call of it;
            otherwise a step calls the units.
    """
    remember_units(root)
    held: dict[Any, _WatchedList] = {unit: _WatchedList(map(_Watched, groups_of(unit))) for unit in sharded_units(root)}
    for unit, own in held.items():
        _WATCHED[unit] = ref(own)
        # prepended: before FSDP2's hook that all-gathers, and before the one that frees
        unit.register_forward_pre_hook(check_before_gather, prepend=True)
        unit.register_forward_pre_hook(partial(_after_gather, own))
        unit.register_forward_hook(partial(_after_forward, own), prepend=True)
    if is_unit(root):
        everything = [group for own in held.values() for group in own]
        root.register_forward_hook(partial(_at_end, everything), prepend=True)


_OTHERS_IN_PLACE: ContextVar[bool] = ContextVar("whether others are in parameters' places", default=False)


@contextmanager
def others_in_place() -> Iterator[None]:
    """Inside, other tensors are in the places of parameters for a comparison, which puts the parameters back."""
    token = _OTHERS_IN_PLACE.set(True)
    try:
        yield
    finally:
        _OTHERS_IN_PLACE.reset(token)


def check_before_gather(called: nn.Module, *_: Any) -> None:
    """Before an all-gather: check that all parameters are in their places, and take over assigned data.

    Raises:
        StepError: A parameter was replaced or removed.
    """
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        found = _WATCHED.get(called)
        for group in (found and found()) or ():
            group.before_gather()


def _at_end(held: Iterable[_Watched], *_: Any) -> None:
    with torch._C.DisableTorchFunction():
        for group in held:
            group.check_in_place()
            group.check_unchanged()


def _after_gather(held: Iterable[_Watched], *_: Any) -> None:
    with torch._C.DisableTorchFunction():
        for group in held:
            group.after_gather()


def _after_forward(held: Iterable[_Watched], *_: Any) -> None:
    with torch._C.DisableTorchFunction():
        for group in held:
            group.after_forward()
