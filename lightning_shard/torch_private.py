"""What is replaced in torch's modules and classes (torch 2.11 to 2.14), each for as long as a context lasts.

* ``torch.distributed``'s collective calls: which ones users' code makes is seen.
* ``distributed_c10d.ProcessGroupGloo``: torch creates groups by it, without a way to pass options (``gloo.py``).
* ``F.scaled_dot_product_attention``: blocks call it, and it attends over ranks (``parallel/context/attention.py``).
* ``Optimizer.__init__``: it refuses no parameters, and a stage may train none.
* ``torch.nn.utils.clip_grad``'s functions, and Lightning's ``grad_norm`` (``gradient_norms.py``).
* ``torch.nn.utils.parametrize._maybe_set``: see :func:`parametrizations_leaving_what_is_given`.

Others (``dtensor_writes.py``, ``opaque_functions.py``) say themselves what they replace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.utils import parametrize

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.13
)
_INHERITED = object()
_lock = threading.Lock()
_stacks: dict[tuple[int, str], list[Any]] = {}
"""By holder and name, what was there, and the replacements that hold now."""


@contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, attributes are others: ``(holder, name, value)``. Contexts of several threads may end in any order."""
    with _lock:
        for holder, name, value in attributes:
            _stacks.setdefault((id(holder), name), [vars(holder).get(name, _INHERITED)]).append(value)
            setattr(holder, name, value)
    try:
        yield
    finally:
        with _lock:
            for holder, name, value in reversed(attributes):
                stack = _stacks[id(holder), name]
                last = max(place for place, each in enumerate(stack) if each is value)
                del stack[last]
                if stack == [_INHERITED]:
                    delattr(holder, name)
                else:
                    setattr(holder, name, stack[-1])
                if len(stack) == 1:
                    del _stacks[id(holder), name]


def functions_replaced(pairs: Iterable[tuple[Any, Any]]) -> AbstractContextManager[None]:
    """Context in which every module that holds a function, as after ``from … import``, holds another in its place."""
    by = dict(pairs)
    held = (
        (module, name, by[value])
        for module in [*sys.modules.values()]
        if isinstance(module, ModuleType)
        for name, value in [*vars(module).items()]
        if type(value) is FunctionType and value in by
    )
    return replaced(*held)


def calls_replaced(by: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Context in which other functions replace the collective calls of ``torch.distributed``.

    Args:
        by: Makes such a function of a call's name and the call.
    """
    calls = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    return replaced(*((dist, name, by(name, call)) for name, call in calls.items()))


def attention_replaced(by: Callable[..., Tensor]) -> AbstractContextManager[None]:
    return replaced((F, "scaled_dot_product_attention", by))


def gloo_groups_replaced(kind: type) -> AbstractContextManager[None]:
    return replaced((distributed_c10d, "ProcessGroupGloo", kind))


def allowing_empty_optimizers() -> AbstractContextManager[None]:
    """Inside, an optimizer without parameters can be created, as where all of them are on other stages."""
    own: Any = torch.optim.Optimizer.__init__

    def make(self: Any, params: Any, defaults: Any) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        own(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    return replaced((torch.optim.Optimizer, "__init__", make))


def parametrizations_leaving_what_is_given() -> AbstractContextManager[None]:
    """Inside, a parametrization that is registered for a call, and then removed, leaves the parameter as it was.

    peft's LoRA of parameters (``target_parameters``, as of a mixture's experts) does so in each forward. To register
    one, torch sets the parameter to what the parametrization's ``right_inverse`` makes of it. Without a
    ``right_inverse`` that is the parameter itself. Nothing is changed, but autograd counts it as a change in place,
    which checks of parameters would refuse, and where microbatches overlap also a backward that needs the parameter.
    """
    plain: Any = vars(parametrize).get("_maybe_set")

    def set_others(parameter: Tensor, value: Tensor) -> None:
        if value is not parameter:
            plain(parameter, value)

    return replaced(*([] if plain is None else [(parametrize, "_maybe_set", set_others)]))
