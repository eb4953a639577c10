"""Private parts of torch (2.11 to 2.14) that others build on, and what is replaced in its modules and classes.

Each is replaced for as long as a context lasts:

* ``torch.distributed``'s collective calls, for all modules or for all but some: which ones users' code makes is seen.
* ``distributed_c10d.ProcessGroupGloo``, and its ``_Options``: torch creates groups by it, without a way to pass
  options (:func:`one_worker`).
* ``F.scaled_dot_product_attention``: blocks call it, and it attends over ranks (``parallel/context/attention.py``).
* ``torch.autograd._engine_run_backward``, the one function that runs all backwards; torch's compiler replaces it too.
  ``torch.autograd.grad`` itself isn't replaced, since user code may have imported it by name.
* ``CheckpointFunction.apply`` and ``_CheckpointFrame.__init__``, which are given the function of a reentrant and of
  another checkpoint, whichever way code has imported ``checkpoint``.
* ``Optimizer.__init__``: it refuses no parameters, and a stage may train none.
* ``torch.nn.utils.clip_grad``'s functions, and Lightning's ``grad_norm`` (``gradient_norms.py``); in Fabric's loops
  only ``_get_total_norm``, between a training step on stages and the optimizer's (:func:`total_norms_checked`).
* ``torch.nn.utils.parametrize._maybe_set``: see :func:`parametrizations_leaving_what_is_given`.

For good, as long as there are sharded parameters: how DTensors behave (``as_tensors.py``), ``nn.Parameter.data``
(``watched_parameters.py``). What else is private is in units (``parallel/fsdp/units.py``) and in the files that
``tests/house/test_private_parts.py`` lists.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import clip_grad, parametrize
from torch.overrides import _get_current_function_mode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

BatchNorm = _BatchNorm
NormOfChannels = _NormBase
"""The base class of BatchNorm's layers and of InstanceNorm's."""
StridedShard = _StridedShard
"""Placement of a shard of each of several parts of a dim, as FSDP2's over tensor-parallel shards."""
without_dispatch_modes = _disable_current_modes
function_mode = _get_current_function_mode
"""Returns the innermost mode that is on."""
is_in_transform = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one within ``torch.func``'s transforms, which has no memory of its own."""
TRANSFORMS: tuple[tuple[Any, str], ...] = ((apis, "vmap_impl"), (eager_transforms, "_jvp_with_argnums"))
"""The functions that ``torch.func``'s transforms call, each by its holder and name."""
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.13
)
_INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable that names gloo's network interfaces, separated by commas; torch reads it where it makes options."""
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
                last = len(stack) - 1
                while stack[last] is not value:
                    last -= 1
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


def calls_replaced(
    by: Callable[[str, Callable[..., Any]], Callable[..., Any]], but_of: tuple[str, ...] = ()
) -> AbstractContextManager[None]:
    """Context in which other functions replace the collective calls of ``torch.distributed``.

    Args:
        by: Makes such a function of a call's name and the call.
        but_of: Beginnings of the names of modules whose calls aren't replaced: these hold a copy of
            ``torch.distributed`` meanwhile.
    """
    plain = SimpleNamespace(**vars(dist))
    holders = (module for name, module in [*sys.modules.items()] if but_of and name.startswith(but_of))
    kept = ((module, key, plain) for module in holders for key, value in [*vars(module).items()] if value is dist)
    calls = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    return replaced(*kept, *((dist, name, by(name, call)) for name, call in calls.items()))


def attention_replaced(by: Callable[..., Tensor]) -> AbstractContextManager[None]:
    return replaced((F, "scaled_dot_product_attention", by))


@contextmanager
def one_worker() -> Iterator[None]:
    """Groups over gloo that are created inside have one worker thread each, as two workers can corrupt memory.

    A worker that has completed a collective writes the collective's name to a string of the group, and holds no lock
    (``ProcessGroupGloo::runLoop`` writes ``lastCompletedWorkName`` in torch 2.11 to 2.13). If both workers of a group
    do so at once, and a name is too long to be kept within the string (that of the all-gathers of DTensor), its memory
    is freed twice, or at a wrong address: the rank dies of SIGSEGV or SIGABRT ("free(): invalid pointer"), about once
    in a million collectives on a busy machine. One worker can't meet another. It runs a group's collectives in the
    order in which they are called, which is the same on all ranks anyway.
    """
    if not dist.is_gloo_available():
        yield
        return
    original = distributed_c10d.ProcessGroupGloo

    class OneWorker(original):  # type: ignore[misc, valid-type]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **settings: bool) -> None:
            options = original._Options()  # type: ignore[attr-defined]
            options._threads = 1
            options._timeout = timeout
            for name, value in settings.items():  # enable_reconfigure, since torch 2.14
                setattr(options, name, value)
            names = os.environ.get(_INTERFACES)
            options._devices = (
                [original.create_device(interface=name) for name in names.split(",")]
                if names
                else [original.create_default_device()]
            )
            super().__init__(store, rank, size, options)

    with replaced((distributed_c10d, "ProcessGroupGloo", OneWorker)):
        yield


def allowing_empty_optimizers() -> AbstractContextManager[None]:
    """Inside, an optimizer without parameters can be created, as where all of them are on other stages."""
    own: Any = torch.optim.Optimizer.__init__

    def make(self: Any, params: Any, defaults: Any) -> None:
        given = params if isinstance(params, Tensor) else list(params)
        own(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    return replaced((torch.optim.Optimizer, "__init__", make))


def total_norms_checked(check: Callable[[list[Tensor]], object]) -> AbstractContextManager[None]:
    """Inside, ``clip_grad_norm_`` first calls a function with the gradients whose norm it takes."""
    own: Any = clip_grad._get_total_norm

    def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        check(given)
        return own(given, *args, **kwargs)  # type: ignore[no-any-return]

    return replaced((clip_grad, "_get_total_norm", total_norm))


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


def backwards_replaced(by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Context in which ``by(torch's own function)`` runs all backwards, those of ``torch.autograd.grad`` too."""
    autograd: Any = torch.autograd
    return replaced((autograd, "_engine_run_backward", by(autograd._engine_run_backward)))


def checkpointed_functions_replaced(
    by: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Context in which checkpoints run ``by(function)``, in the forward and in the backward."""
    reentrant: Any = checkpoint.CheckpointFunction
    other: Any = checkpoint._CheckpointFrame
    apply, make = reentrant.apply, other.__init__

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():  # as in trial runs of a block, where torch warns of missing gradients
            return function(*args)
        return apply(by(function), preserve, *args)

    def begin(frame: Any, function: Callable[..., Any], *rest: Any, **others: Any) -> None:
        make(frame, by(function), *rest, **others)

    return replaced((reentrant, "apply", run), (other, "__init__", begin))


def is_in_function() -> bool:
    """Whether an autograd function's ``forward`` runs: unlike ``torch.no_grad()``, it also switches off forward-mode
    gradients. So does inference mode, which has a flag of its own.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()


def is_in_backward() -> bool:
    """Whether a backward runs this code, on whichever thread: on a GPU it has one of its own."""
    return torch._C._current_graph_task_id() != -1


def take_mark_of_fsdp(module: torch.nn.Module) -> None:
    """Remove what ``fully_shard`` sets for torch.compile, by which others tell that FSDP shards a module."""
    module._is_fsdp_managed_module = False  # type: ignore[assignment]


def set_version(tensor: Tensor, version: int) -> None:
    """Set the number by which a graph that saved a tensor detects that it was changed in place."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def swap(one: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are, for all that refer to them, by weak references too, unlike ``swap_tensors``."""
    torch._C._swap_tensor_impl(one, other)  # type: ignore[attr-defined]


def saves_by_hooks() -> bool:
    """Whether hooks take what operations save for the backward, as within an activation checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def alias(tensor: Tensor) -> Tensor:
    """An alias with the tensor's version, as torch's own contexts of checkpoints make it."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def handlers_of_dtensors() -> dict[Any, Callable[..., Any]]:
    """By operation, what DTensors run in its place, looked up in each call; called with (operation, args, kwargs)."""
    sharded: Any = DTensor
    return sharded._op_dispatcher._custom_op_handlers  # type: ignore[no-any-return]


def patch_dtensors(attributes: Mapping[str, Any], plans: Callable[[Any], Any], ends: Callable[[Any], Any]) -> None:
    """Set attributes of the class DTensor, and wrap two methods of its dispatcher (torch 2.13); for good.

    Args:
        plans: Wraps what plans an operation the first time that it occurs, or returns its result. A failed plan isn't
            cached.
        ends: Wraps what in-place operations pass through last.
    """
    sharded: Any = DTensor
    for name, value in attributes.items():
        setattr(sharded, name, value)
    dispatcher = type(sharded._op_dispatcher)
    methods = {"_propagate_op_sharding_dispatch_slow_path": plans, "_dispatch_fast_path_python_tail": ends}
    for name, wrap in methods.items():
        plain = getattr(dispatcher, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(dispatcher, name, wrap(plain))


@functools.cache
def written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation of torch's writes to, by its schema."""
    schema = getattr(operation, "_schema", None)  # not of higher-order operators
    if schema is None or not schema.is_mutable:
        return ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
