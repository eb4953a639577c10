"""Lets optimizers step sharded parameters that torch's DTensors don't suffice for, such as Adafactor and Prodigy.

Their code runs as it is, operation by operation. One that DTensors don't support is computed from whole tensors, which
each rank gathers for it. A plain tensor counts as one that all ranks hold whole, which is so of state that is made by a
parameter's shape and computed from whole tensors (Adafactor's means over rows and columns), and not of what a rank
makes of its own part. So an optimizer is tried at setup: it has to step sharded parameters as it steps plain ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shard import tree
from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.parallel.fsdp.as_tensors import full, reduced
from lightning_shard.plugin.optimizers.trials import initial, is_of_torch, kinds_of_groups, stepped, tried

_TOLERANCE = 0.05
"""Of a whole update: an optimizer may multiply in 16 bits. What is computed from one rank's part differs by more."""
_SIZES = (131, 130, 2, 2, 2)
"""The first sizes of a tried parameter. Ranks share it unevenly, and optimizers factor matrices of sizes above 128."""
_CHANGING = {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow"))}
_TRIED_OF_TORCH = (torch.optim.Adafactor, torch.optim.Rprop)

_running = ExitStack()


def allow(optimizer: torch.optim.Optimizer) -> None:
    """Compute from whole tensors what an optimizer needs so; collective over a stage's ranks."""
    if is_of_torch(optimizer) and not isinstance(optimizer, _TRIED_OF_TORCH):
        return
    trials = [*_trials(optimizer)]
    alike = [is_alike() for is_alike in trials]
    if all(alike):
        return
    with _whole_where_needed():
        then_alike = [is_alike() for is_alike in trials]
    if all(then_alike):
        optimizer.register_step_pre_hook(_begin)
        optimizer.register_step_post_hook(lambda *_: end())
    elif False in (*alike, *then_alike):
        raise ConfigurationError(
            f"{type(optimizer).__name__} steps a parameter of which each rank has a part otherwise than a whole"
            " one: it computes something from this rank's part that needs all of it, as by to_local(). Compute"
            " with parameters and gradients as they are given, or use one process, or another strategy.",
            breaks=11,
        )


def end() -> None:
    """A step has ended, or failed."""
    _running.close()


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook: of the step's arguments, the closure is the user's code."""

    def outside(closure: Callable[[], Any]) -> Any:
        end()
        result = closure()
        _running.enter_context(_whole_where_needed())
        return result

    _running.enter_context(_whole_where_needed())
    given = (partial(outside, each) if callable(each) else each for each in args)
    named = {key: partial(outside, each) if callable(each) else each for key, each in kwargs.items()}
    return tuple(given), named


@contextmanager
def _whole_where_needed() -> Iterator[None]:
    with implicit_replication(), _WholeWhereNeeded():
        yield


class _WholeWhereNeeded(TorchFunctionMode):
    """Repeats operations with whole tensors that DTensors don't support."""

    def __init__(self) -> None:
        super().__init__()
        self._gathered = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not tree.leaves((args, kwargs), DTensor):
            self._refuse_lost(func, args)
            return func(*args, **kwargs)
        if isinstance(out := kwargs.get("out"), Tensor):
            result = self._computed(func, args, {**kwargs, "out": None})
            return out.copy_(result if isinstance(out, DTensor) else full(result))
        if not _changes(func):
            return self._computed(func, args, kwargs)
        target, others = args[0], (args[1:], kwargs)
        if not tree.leaves(target, DTensor):
            self._refuse_lost(func, args)
            others, named = full(others)
            return func(target, *others, **named)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            whole = full(args)
            func(*whole, **full(kwargs))
            for each, now in zip(*([held] if isinstance(held, Tensor) else held for held in (target, whole[0]))):
                each.copy_(now)
            return target

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function returns that changes nothing; sums that are still to be added over ranks are added."""
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            args, kwargs = tree.map_leaves(self._whole, (args, kwargs))
            return func(*args, **kwargs)
        return tree.map_leaves(reduced, result)

    def _whole(self, leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            leaf = leaf.full_tensor()
            self._gathered[_memory_of(leaf)] = None
        return leaf

    def _refuse_lost(self, func: Any, args: Any) -> None:
        """Refuse to change a view of what was gathered: the parameter wouldn't change."""
        targets = tree.tensors(args[0]) if args and _changes(func) else []
        if any(_memory_of(each) in self._gathered for each in targets):
            raise StepError(
                f"An optimizer changes a view of a parameter or gradient ({func.__name__}) that sharded ones don't have"
                " (a flattened one whose first size isn't a multiple of the number of ranks): change the parameter"
                " itself, or use one process.",
                breaks=11,
            )


def _memory_of(tensor: Tensor) -> Tensor:
    """The tensor that a view is of; what ``full_tensor()`` returns is one, too."""
    return tensor if tensor._base is None else tensor._base


def _changes(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name: str = getattr(func, "__name__", "")
    return name in _CHANGING if name.endswith("__") else name.endswith("_")


def _trials(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], bool | None]]:
    """One for each kind of group, number of dims, and way in which ranks share a parameter.

    Each returns whether the optimizer steps a parameter that ranks share as a whole one; ``None`` if it fails. Those of
    which nothing is known are left out.
    """
    for groups in kinds_of_groups(optimizer):
        parameters = chain.from_iterable(optimizer.param_groups[group]["params"] for group in groups)
        shared = (p for p in parameters if isinstance(p, DTensor) and p.ndim)
        for like in {(p.ndim, p.device_mesh, p.placements): p for p in shared}.values():
            end = _end(optimizer, groups[0], partial(Tensor.to, device=like.device), like.ndim)
            if end is not None and end.isfinite().all():
                yield partial(_is_stepped_alike, optimizer, groups[0], like, end)


def _is_stepped_alike(optimizer: torch.optim.Optimizer, group: int, like: DTensor, end: Tensor) -> bool | None:
    shared = _end(optimizer, group, partial(_placed, like=like), like.ndim)
    if shared is None:
        return None
    update = (end - initial(end.shape).to(end)).abs().max()
    return bool((shared - end).abs().max() <= _TOLERANCE * update)


def _end(optimizer: torch.optim.Optimizer, group: int, place: Callable[[Tensor], Tensor], dims: int) -> Tensor | None:
    end = tried(optimizer, group, lambda make: stepped(make, place=place, shape=_SIZES[:dims]))
    return end.full_tensor() if isinstance(end, DTensor) else end


def _placed(whole: Tensor, like: DTensor) -> Tensor:
    """A parameter, of which each rank takes its part as it has one of ``like``."""
    dims = (getattr(each, "dim", None) for each in like.placements)
    placements = [Replicate() if dim is None else Shard(min(dim, whole.ndim - 1)) for dim in dims]
    return distribute_tensor(whole.to(like.device), like.device_mesh, placements, src_data_rank=None)
