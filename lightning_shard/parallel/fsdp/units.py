"""FSDP2's units: their classes and private parts, and checks that changes of their parameters in steps aren't lost.

FSDP2 makes each unit an object of a class that it derives from the module's own. Code that asks ``type(layer) is
nn.Linear``, or a module for its name, would do something else then. So units have their own class back, and FSDP2's
while FSDP2's methods run.

A unit holds each parameter as two tensors. The shard is in the module between steps, and is what the optimizer trains.
The unsharded (all-gathered) parameter is in the module during a step; its memory is freed afterwards. What a user sets
on one must act on the other, and is refused if it would be lost. These checks run in each step, so they never wait for
a device.

Private (torch 2.11 to 2.13): the units' parameter groups, the states of their parameters, the handles of the hooks
around their forward, and the hook that begins their backward (``_pre_backward``). torch's own pipeline stages
(``torch/distributed/pipelining/stage.py``) use the groups too. Before 2.13 a unit had at most one group.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.errors import StepError

Returned = TypeVar("Returned")
_UNITS: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()
"""The units of modules whose sharding is done: a cache, since each step needs them and a search is slow."""


_OF_FSDP: WeakKeyDictionary[nn.Module, type[nn.Module]] = WeakKeyDictionary()
"""FSDP2's class of each unit that has its own one back."""


def is_unit(module: nn.Module) -> bool:
    return module in _OF_FSDP or isinstance(module, FSDPModule)


def give_classes_back(root: nn.Module) -> None:
    """Make the units of a model, which FSDP2 was applied to, objects of their own classes again."""
    units: list[Any] = [module for module in root.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        _OF_FSDP[unit] = type(unit)
        unit.__class__ = own_class(unit)
        unit.__dict__["_apply"] = partial(call_fsdp, unit, FSDPModule._apply)  # moves the parameters to another device


def call_fsdp(unit: nn.Module, method: Callable[..., Returned], *args: Any, **kwargs: Any) -> Returned:
    """Call a method of ``FSDPModule`` on a unit."""
    own = unit.__class__
    unit.__class__ = _OF_FSDP.get(unit, own)
    try:
        return method(unit, *args, **kwargs)
    finally:
        unit.__class__ = own


def state_of(unit: nn.Module) -> Any:
    """FSDP2's state of a unit."""
    return call_fsdp(unit, FSDPModule._get_fsdp_state)


def sharded_units(root: nn.Module) -> Iterator[nn.Module]:
    """All FSDP2 units of a model, in the order of its modules."""
    known = _UNITS.get(root)
    if known is None:
        return _find_units(root)
    return (unit for each in known if (unit := each()) is not None)


def _find_units(root: nn.Module) -> Iterator[nn.Module]:
    return filter(is_unit, root.modules())


def groups_under(root: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of all units of a model."""
    for unit in sharded_units(root):
        yield from groups_of(unit)


def groups_of(unit: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups of one unit; they hold its parameters' states and unreduced gradients."""
    state = state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def class_name(module: nn.Module) -> str:
    return own_class(module).__name__


def own_class(module: nn.Module) -> type:
    """A module's own class, of a unit of FSDP2's too."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def is_set_up(root: nn.Module) -> bool:
    """Whether FSDP2 has initialised itself for the units of ``root``, as it does in the first call of ``root``."""
    return state_of(root)._is_root is not None


def set_up(root: nn.Module) -> None:
    """Have FSDP2 initialise itself for ``root`` and the units in it, as the first call of ``root`` would.

    If a unit in it were called first, FSDP2 would take that for the root, and refuse calls of ``root``.
    """
    if is_unit(root) and not is_set_up(root):
        state_of(root)._lazy_init()


class _WatchedList(list["_Watched"]):
    """The parameters to check in calls of one module. Only the module's hook owns the list.

    The list refers back to the module, so :data:`_WATCHED` has a weak reference to it.
    """


_WATCHED: WeakKeyDictionary[nn.Module, ref[_WatchedList]] = WeakKeyDictionary()


class _Watched:
    """One parameter of a unit, with the modules and names that hold it."""

    def __init__(self, group: Any, parameter: Any) -> None:
        info = parameter._module_info
        self._group = group
        self._parameter = parameter
        self._slots = [
            (info.module, info.param_name),
            *zip(info.shared_modules, info.shared_param_names),
        ]
        self._local = parameter.sharded_param._local_tensor
        self._version: int | None = None

    def before_gather(self) -> None:
        """Check before the all-gather for a step; take over a shard that was assigned by ``p.data = …``."""
        held = self._parameter
        self.check_in_place()
        if self._group.is_sharded and held.sharded_param._local_tensor is not self._local:
            held.reset_sharded_param()  # FSDP2 itself has still the old local tensor
            self._local = held.sharded_param._local_tensor

    def after_forward(self) -> None:
        """Check after the unit's forward, before the parameter is freed; take over ``requires_grad``."""
        if not self._group.is_unsharded:
            return
        self.check_in_place()
        sharded, gathered = self._parameter.sharded_param, self._parameter._unsharded_param
        version, self._version = self._version, gathered._version
        if version not in (None, self._version) or not self._is_over_gathered_memory(gathered):
            raise StepError(self._text("was changed in place while it was unsharded (all-gathered) for a step", _LOST))
        if sharded.requires_grad != gathered.requires_grad:
            sharded.requires_grad_(gathered.requires_grad)

    def _is_over_gathered_memory(self, gathered: Any) -> bool:
        """False after ``p.data = …`` in a step: the parameter would keep that memory, and not be all-gathered again."""
        local = gathered._local_tensor if isinstance(gathered, DTensor) else gathered
        outputs = self._parameter.all_gather_outputs
        return len(outputs) != 1 or bool(local.data_ptr() == outputs[0].data_ptr())

    def check_in_place(self) -> None:
        held = self._parameter
        expected = held.sharded_param if self._group.is_sharded else held._unsharded_param
        for module, name in self._slots:
            if module._parameters.get(name) is not expected:
                raise StepError(self._text("was replaced or removed after the module was sharded", _REPLACED))

    def _text(self, what: str, remedy: str) -> str:
        module, name = self._slots[0]
        shape = tuple(self._parameter.sharded_param.shape)
        return f"The parameter {name!r} of a {type(module).__name__}, of shape {shape}, {what}{remedy}"


_REPLACED = (
    ", but FSDP2 still gathers and trains the original: change its values in place, as by copy_, or replace it in"
    " __init__, configure_model or setup. torch.func.functional_call replaces parameters too, for one call: use it"
    " only for a module that isn't in a block, or use data_parallel_size=1."
)
_LOST = (
    ", and the change is lost when it is resharded: make it in on_train_batch_start or on_train_batch_end, where it is"
    " sharded, or keep it as a buffer."
)


@contextmanager
def within_its_call(module: nn.Module) -> Iterator[None]:
    """Context within a call of a module, in which it may be called once more: as a unit it is gathered already.

    FSDP2 would free the parameters at the end of the outer call, since its hooks take that for one without a beginning,
    and gather them again for the backward. A step that calls ``self(x)`` is such a call.
    """
    if not is_unit(module):
        yield
        return
    state: Any = call_fsdp(module, FSDPModule._get_fsdp_state)
    hooks: list[tuple[dict[int, Any], int]] = [
        (module._forward_pre_hooks, state._pre_forward_hook_handle.id),
        (module._forward_hooks, state._post_forward_hook_handle.id),
    ]
    own = [held[index] for held, index in hooks]
    for held, index in hooks:
        held[index] = _nothing
    try:
        yield
    finally:
        for (held, index), hook in zip(hooks, own):
            held[index] = hook


def _nothing(*_: Any) -> None:
    """In place of a hook, whose place among others it keeps."""


def watch_parameters(root: nn.Module) -> None:
    """Register hooks: what is set on parameters, unsharded or not, acts in the next step at the latest, or is refused.

    Args:
        root: The model, after FSDP2 was applied to all its units. If ``root`` is a unit, a step is a call of it;
            otherwise a step calls the units.
    """
    _UNITS[root] = [*map(ref, _find_units(root))]
    held: dict[Any, _WatchedList] = {
        unit: _WatchedList(_Watched(group, parameter) for group in groups_of(unit) for parameter in group.fsdp_params)
        for unit in sharded_units(root)
    }
    for unit, own in held.items():
        _WATCHED[unit] = ref(own)
        # prepended: before FSDP2's hook that all-gathers, and before the one that frees
        unit.register_forward_pre_hook(check_before_gather, prepend=True)
        unit.register_forward_hook(partial(_after_forward, own), prepend=True)
    if is_unit(root):
        everything = _WatchedList(parameter for own in held.values() for parameter in own)
        _WATCHED[root] = ref(everything)
        root.register_forward_hook(partial(_all_in_place, everything), prepend=True)


def gather_for_views(units: Iterable[nn.Module]) -> None:
    """Make units all-gather for their backward even if code around them changes, in place, a view that they returned.

    FSDP2 begins a unit's backward when the gradient of its output arrives. After a change in place, autograd recomputes
    a view from its base, and the node that the unit returned gets no gradient. The base gets one in either case. So
    torch's warning that the all-gather would be skipped isn't shown.
    """
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    for unit in units:
        unit.register_forward_hook(_wait_for_bases, with_kwargs=True)


def gather_for_backward(unit: Any, args: Any, output: Any) -> None:
    """Make a unit all-gather for the backward through ``output``, and reduce its gradients at the end, as FSDP2 does.

    For a call of a part of the unit: FSDP2 itself sees calls of whole units only.
    """
    if torch.is_grad_enabled():
        begin = state_of(unit)._pre_backward
        for tensor in tree.tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)
        _wait_for_bases(unit, args, {}, output)


def _wait_for_bases(unit: Any, args: Any, kwargs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        given = {id(base) for base in _bases((args, kwargs))}  # their gradients come after the unit's backward
        for base in {id(base): base for base in _bases(output)}.values():
            if base.grad_fn is not None and id(base) not in given:
                base.register_hook(state_of(unit)._pre_backward)


def _bases(value: Any) -> Iterator[Any]:
    return (tensor._base for tensor in tree.tensors(value) if tensor._base is not None)


def check_before_gather(called: nn.Module, *_: Any) -> None:
    """Before an all-gather: check that all parameters are in their places, and take over assigned data.

    Raises:
        StepError: A parameter was replaced or removed.
    """
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        found = _WATCHED.get(called)
        for parameter in (found and found()) or ():
            parameter.before_gather()


def _all_in_place(held: Iterable[_Watched], *_: Any) -> None:
    for parameter in held:
        parameter.check_in_place()


def _after_forward(held: Iterable[_Watched], *_: Any) -> None:
    with torch._C.DisableTorchFunction():
        for parameter in held:
            parameter.after_forward()
