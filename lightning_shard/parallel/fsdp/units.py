"""FSDP2's units: their classes, their private parts, when their backward begins, and how mixed dtypes divide them.

FSDP2 makes each unit an object of a class that it derives from the module's own. Code that asks ``type(layer) is
nn.Linear``, or a module for its name, would do something else then. So units have their own class back, and FSDP2's
while FSDP2's methods run.

Private (torch 2.11 to 2.14): the classes that FSDP2 has derived, the units' parameter groups (before 2.13 at most one),
the states of their parameters, the handles of the hooks around their forward, the hook that begins their backward
(``_pre_backward``), and the order of forwards by which they prefetch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from lightning_shard import tree
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.containers import called_below
from lightning_shard.subclasses import unannounced_base

Returned = TypeVar("Returned")
_UNITS: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()
"""The units of modules whose sharding is done: a cache, since each step needs them and a search is slow."""


_OF_FSDP: WeakKeyDictionary[nn.Module, type[nn.Module]] = WeakKeyDictionary()
"""FSDP2's class of each unit that has its own one back."""


def is_unit(module: nn.Module) -> bool:
    return module in _OF_FSDP or isinstance(module, FSDPModule)


def make_unit(module: nn.Module, **options: Any) -> None:
    """Apply FSDP2 to a module, in a class that the user's classes aren't told of, and whose memory layout fits."""
    own = cast(Any, type(module))
    if own not in cls_to_fsdp_cls:
        cls_to_fsdp_cls[own] = type(own)(f"FSDP{own.__name__}", (unannounced_base(own), FSDPModule, own), {})
    fully_shard(module, **options)


def leave_gathers_uncounted(root: nn.Module) -> None:
    """Hide all-gathers, which units do if they aren't gathered, from stages: these count a microbatch's operations."""
    for group in groups_under(root):
        for gathers in ("unshard", "wait_for_unshard"):
            setattr(group, gathers, _uncounted(getattr(group, gathers)))


def _uncounted(gathers: Callable[..., Returned]) -> Callable[..., Returned]:

    def uncounted(*args: Any, **kwargs: Any) -> Returned:
        with torch._C.DisableTorchFunction():
            return gathers(*args, **kwargs)

    return uncounted


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
    return _get_module_fsdp_state(unit)


def sharded_units(root: nn.Module) -> list[nn.Module]:
    """All FSDP2 units of a model, in the order of its modules."""
    known = _UNITS.get(root)
    return [*filter(is_unit, root.modules())] if known is None else [unit for each in known if (unit := each())]


def remember_units(root: nn.Module) -> None:
    """Sharding of a model is done: its units won't change."""
    _UNITS[root] = [*map(ref, sharded_units(root))]


def groups_under(root: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of all units of a model."""
    return [group for unit in sharded_units(root) for group in groups_of(unit)]


def groups_of(unit: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of one unit; they hold its parameters' states and unreduced gradients."""
    state: Any = _get_module_fsdp_state(unit)
    groups = getattr(state, "_fsdp_param_groups", None)
    return [*filter(None, [state._fsdp_param_group])] if groups is None else groups


def frees(unit: nn.Module) -> bool:
    """Whether a unit's parameters are freed after its forward."""
    return any(group._reshard_after_forward for group in groups_of(unit))


def gathered_in(group: Any) -> list[tuple[Any, Any]]:
    """The states of a group's parameters with their unsharded tensors; none before the unit is first gathered."""
    return [(each, each._unsharded_param) for each in group.fsdp_params if hasattr(each, "_unsharded_param")]


def class_name(module: nn.Module) -> str:
    return own_class(module).__name__


def own_class(module: nn.Module) -> type:
    """A module's own class, of a unit of FSDP2's too."""
    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1] if FSDPModule in kinds else kinds[0]


def is_set_up(root: nn.Module) -> bool:
    """Whether FSDP2 has initialised itself for the units of ``root``, as it does in the first call of ``root``."""
    return state_of(root)._is_root is not None


def set_up(root: nn.Module) -> None:
    """Have FSDP2 initialise itself for ``root`` and the units in it, as the first call of ``root`` would.

    If a unit in it were called first, FSDP2 would take that for the root, and refuse calls of ``root``.
    """
    if not is_set_up(root):
        state_of(root)._lazy_init()


def within_its_call(module: nn.Module) -> AbstractContextManager[None]:
    """Context within a call of a module, in which it may be called once more: as a unit it is gathered already.

    FSDP2 would free the parameters at the end of the outer call, since its hooks take that for one without a beginning,
    and gather them again for the backward. A step that calls ``self(x)`` is such a call.
    """
    return _without_hooks(module) if is_unit(module) else nullcontext()


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    state = state_of(module)
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


def leave_out_prefetching(units: Iterable[nn.Module]) -> None:
    """Make the next backward all-gather no unit before its turn, in a step whose units stay gathered to its end.

    FSDP2 prefetches the unit whose forward came before. A pipeline's stage has run other forwards since, and more of
    them on a data rank that has searched for what crosses. So the last backward would gather units again that are done,
    other ones on each rank, and wait for ever.
    """
    for unit in units:
        for group in groups_of(unit):
            group._post_forward_indices.clear()


def gather_for_backward(unit: Any, args: Any, output: Any) -> None:
    """Make a unit all-gather for the backward through ``output``, and reduce its gradients at the end, as FSDP2 does.

    For a call of a part of the unit: FSDP2 itself sees calls of whole units only.
    """
    if not torch.is_grad_enabled():
        return
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        given = {id(base) for base in _bases(args)}  # their gradients come after the unit's backward
        bases = {id(base): base for base in _bases(output) if base.grad_fn is not None and id(base) not in given}
        for tensor in (*(each for each in tree.tensors(output) if each.requires_grad), *bases.values()):
            tensor.register_hook(state_of(unit)._pre_backward)


def _bases(value: Any) -> Iterator[Any]:
    return (tensor._base for tensor in tree.tensors(value) if tensor._base is not None)


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
