"""Checks that what users change of the parameters of FSDP2's units isn't lost.

A unit holds each parameter as two tensors. The shard is in the module between steps, and is what the optimizer trains.
The unsharded (all-gathered) parameter is in the module during a step; its memory is freed afterwards. What a user sets
on one must act on the other, and is refused if it would be lost. These checks run in each step, so they never wait for
a device.

``p.data.mul_(…)`` doesn't change the version of ``p``. So of parameters that are watched in steps what ``data`` gives
is kept, with a copy, until they are checked. What writes nothing new, as a clamp of weights that are within its bounds,
is allowed.

Private (torch 2.11 to 2.14): of the states of parameters, the modules that hold them, and the memory they gather to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.units import groups_of
from lightning_shard.sharding import share_attributes

_DATA: Any = torch.Tensor.data
_SHOWN = WeakIdKeyDictionary()
TAKEN = WeakIdKeyDictionary()
"""Of each parameter whose ``data`` was taken since it was checked: a copy of it as it was, and all that was given.
Empty, there is nothing to check."""


def show_writes(parameter: Tensor) -> None:
    """Have changes of this parameter's ``data`` be seen by :func:`was_written`."""
    _SHOWN[parameter] = True


def was_written(parameter: Tensor) -> bool:
    """Whether its ``data`` was taken since the last call, and its values were changed by that; not if they are freed.

    Waits for the device only where something was written.
    """
    if parameter not in TAKEN:
        return False
    before, given = TAKEN.pop(parameter)
    with torch._C.DisableTorchFunction():
        is_there = _local(given[0]).untyped_storage().nbytes() > 0
        return is_there and any(data._version for data in given) and _differ(given[0], before)


def data_of(tensor: Any) -> Tensor:
    """``tensor.data``."""
    data: Any = _DATA.__get__(tensor)
    if tensor in _SHOWN:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if tensor not in TAKEN:
                TAKEN[tensor] = (_local(data).clone(), [])
            TAKEN[tensor][1].append(data)
    return data  # type: ignore[no-any-return]


def watch_data() -> None:
    """Patch ``nn.Parameter.data``, of all parameters of this process; ``as_tensors.py`` patches DTensor's."""
    watched: Any = nn.Parameter
    watched.data = property(data_of, _DATA.__set__)


def _local(data: Any) -> Tensor:
    return getattr(data, "_local_tensor", data)  # type: ignore[no-any-return]


def _differ(data: Tensor, before: Tensor) -> bool:
    now = _local(data)
    return bool(((now != before) & ~(now.isnan() & before.isnan())).any())


_WATCHED: WeakKeyDictionary[nn.Module, ref[Watched]] = WeakKeyDictionary()


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
        return refusal(self.held._param_fqn or name, module, self.held.sharded_param, what)


class Watched:
    """A unit's parameters. Checked as a whole, since a call in Python for each parameter would take longer.

    It refers to modules, so :data:`_WATCHED` has a weak reference to it; the unit's hooks own it.
    """

    def __init__(self, unit: nn.Module) -> None:
        self._groups = [(group, [*map(_Parameter, group.fsdp_params)]) for group in groups_of(unit)]
        _WATCHED[unit] = ref(self)

    def before_gather(self) -> None:
        """Check before the all-gather for a step; take over a shard that was assigned by ``p.data = …``.

        Raises:
            StepError: A parameter was replaced or removed.
        """
        self._check_in_place()
        for group, parameters in self._groups:
            for each in parameters if group.is_sharded else ():
                if each.held.sharded_param._local_tensor is not each.local:
                    each.held.reset_sharded_param()  # FSDP2 itself has still the old local tensor
                    each.local = each.held.sharded_param._local_tensor

    def after_gather(self) -> None:
        """Have parameters that FSDP2 has made by this gather be as those that they stand for, and be watched."""
        for _, parameters in self._groups:
            for each in parameters:
                gathered: Any = getattr(each.held, "_unsharded_param", None)
                if gathered is not each.gathered:
                    each.gathered, each.version = gathered, gathered._version
                    show_writes(gathered)
                    share_attributes(gathered, each.held.sharded_param)

    def after_forward(self) -> None:
        """Check after the unit's forward, before the parameters are freed; take over ``requires_grad``.

        Raises:
            StepError: A parameter was replaced, or changed in place.
        """
        self.check()
        for group, parameters in self._groups:
            for each in parameters if group.is_unsharded else ():
                sharded, gathered = each.held.sharded_param, each.gathered
                if sharded.requires_grad != gathered.requires_grad:
                    sharded.requires_grad_(gathered.requires_grad)

    def check(self) -> None:
        """Check that all are in their places, and that those gathered, if any, were left as they were gathered.

        Raises:
            StepError: A parameter was replaced, or changed in place.
        """
        self._check_in_place()
        was_taken = bool(TAKEN)
        for group, parameters in self._groups:
            is_unsharded = group.is_unsharded
            for each in parameters:
                gathered = each.gathered
                if gathered is None:
                    continue
                is_changed = gathered._version != each.version
                if is_unsharded:
                    # after ``p.data = …`` in a step the parameter would keep that memory, and not be gathered again
                    local = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
                    outputs = each.held.all_gather_outputs
                    is_changed |= len(outputs) == 1 and local.data_ptr() != outputs[0].data_ptr()
                if is_changed or (was_taken and was_written(gathered)):
                    raise each.error(_LOST)

    def _check_in_place(self) -> None:
        if _OTHERS_IN_PLACE.get():
            return
        for group, parameters in self._groups:
            is_sharded = group.is_sharded
            for each in parameters:
                expected = each.held.sharded_param if is_sharded else each.held._unsharded_param
                for module, name in each.slots:
                    if module._parameters.get(name) is not expected:
                        raise each.error(REPLACED)


def refusal(name: str, module: nn.Module, parameter: Tensor, what: str) -> StepError:
    shape = tuple(parameter.shape)
    return StepError(f"The parameter {name} of a {type(module).__name__}, of shape {shape}, {what}", breaks=8)


REPLACED = (
    "was replaced or removed after the module was sharded, but the optimizer still trains the original: change its"
    " values in place, as by copy_, or replace it in __init__, configure_model or setup. (On data ranks"
    " torch.func.functional_call does so for one call: use it only for a module that isn't in a block.)"
)
_LOST = (
    "was changed in place in a step. In a step parameters are read, not written: it is"
    " unsharded (all-gathered) for the step, and the change would be lost when it is resharded. Make it in"
    " on_train_batch_start or on_train_batch_end, where it is sharded, or keep it as a buffer."
)


_OTHERS_IN_PLACE: ContextVar[bool] = ContextVar("whether others are in parameters' places", default=False)


@contextmanager
def others_in_place() -> Iterator[None]:
    """Inside, other tensors are in the places of parameters for a comparison, which puts the parameters back."""
    token = _OTHERS_IN_PLACE.set(True)
    try:
        yield
    finally:
        _OTHERS_IN_PLACE.reset(token)


def check_before_gather(unit: nn.Module) -> None:
    """Before an all-gather of a unit, other than by its call: :meth:`Watched.before_gather`."""
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        if (found := _WATCHED.get(unit)) is not None and (watched := found()) is not None:
            watched.before_gather()
