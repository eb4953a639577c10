"""What happens in a call of one of FSDP2's units: its own arguments, its parameters' checks, and a record of the call.

Units get the objects that their caller passes: containers of any class, and tensors.

FSDP2 replaces arguments that need gradients by views, made by an autograd function whose backward ends the unit's
backward: it reduces gradients and frees parameters. For this it copies the lists, dicts and dataclasses that hold such
tensors. A unit would write into the copies, and autograd refuses to change these views in place.

So FSDP2 isn't shown the arguments. A unit's backward ends when autograd reaches the node that made the newest of them.
Autograd runs the nodes that a thread has recorded in reverse order, so all nodes of the unit have run by then; FSDP2
relies on this order as well, for parameters that no path connects with an argument. Where there is no such node, the
unit's backward ends with the whole backward. The node of a leaf isn't in this order: FSDP2 gets leaves that are
arguments by themselves, and the unit its views of them.

A unit's backward begins when the gradient of an output arrives, in whatever mapping or dataclass it is. It doesn't with
outputs that are arguments: their gradients may come after the unit's backward, and FSDP2 would gather the unit again.
It does with the tensor that an output is a view of: after a change in place by the code around the unit, autograd
recomputes a view from its base, and the node that the unit returned gets no gradient.

Private (torch 2.11 to 2.14): the handles of the hooks around a unit's forward, the state of its backward, its groups'
``post_backward``, and the order of a tensor's hooks (``_backward_hooks``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.parallel.fsdp.units import groups_of, state_of
from lightning_shard.parallel.fsdp.watched_parameters import Watched

Node = Any
"""A node of autograd's graph."""


@dataclass(frozen=True)
class UnitCall:
    """A call of a unit: the nodes that made its arguments, and its outputs that aren't among these."""

    unit: nn.Module
    given: list[Node]
    returned: list[Node] = field(default_factory=list)


_RECORDED: ContextVar[list[UnitCall] | None] = ContextVar("where calls of units are recorded", default=None)


@contextmanager
def recorded(calls: list[UnitCall]) -> Iterator[None]:
    """Context in which calls of units are appended to ``calls``; not those that a checkpoint repeats in a backward."""
    token = _RECORDED.set(calls)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def watch_calls(units: Iterable[nn.Module], root: nn.Module | None = None) -> None:
    """Make units get the caller's own arguments, in place, and check their parameters before and after each call.

    Args:
        root: If it is one of the units, a step is a call of it, and after it the parameters of all are checked.
    """
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")  # bases begin backwards too
    watched = {unit: Watched(unit) for unit in units}
    for unit, own in watched.items():
        call, state = _Call(unit, own, [*watched.values()] if unit is root else ()), state_of(unit)
        before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        unit._forward_pre_hooks[before] = partial(call.begins, unit._forward_pre_hooks[before])
        unit._forward_hooks[after] = partial(call.ends, unit._forward_hooks[after])


class _Call:
    """What a unit's call does in place of FSDP2's own hooks, which it calls.

    Stages count the operations of users' code, and must not count these: hence ``DisableTorchFunction``.
    """

    def __init__(self, unit: nn.Module, watched: Watched, of_step: Iterable[Watched]) -> None:
        self._state = state_of(unit)
        self._watched, self._of_step = watched, of_step
        self._groups = [*groups_of(unit)]
        self._given: dict[int, int] = {}  # numbers of the arguments' nodes before the call, by ids of tensors
        self._recorded: UnitCall | None = None

    def begins(self, fsdp: Callable[..., Any], unit: nn.Module, args: Any, kwargs: Any) -> Any:
        runs_again = self._state._training_state.name == "PRE_BACKWARD"  # in a checkpoint, whose graph isn't used
        given = _differentiable((args, kwargs)) if torch.is_grad_enabled() and not runs_again else []
        self._given, self._recorded = {}, None
        number, newest = _LEAF, None
        nodes = []
        for each, node, tensor in given:
            self._given[id(tensor)] = each
            if newest is None or each > number:
                number, newest = each, tensor
            if node is not None:
                nodes.append(node)
        if (calls := _RECORDED.get()) is not None and not runs_again:
            self._recorded = UnitCall(unit, nodes)
            calls.append(self._recorded)
        is_leaf = newest is not None and not nodes
        # at least one: torch 2.11 takes the first of those that it has moved to a CUDA device
        both = (*args, *kwargs.values()) if is_leaf else (None,)
        with torch._C.DisableTorchFunction():
            self._watched.before_gather()
        views, _ = fsdp(unit, tuple([e if isinstance(e, Tensor) else None for e in both]), {})
        with torch._C.DisableTorchFunction():
            self._watched.after_gather()
        if is_leaf:
            own = [each if view is None else view for each, view in zip(both, views)]
            return tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :]))
        if newest is not None:
            _hook_first(newest, self._end_backward)
        return None

    def ends(self, fsdp: Callable[..., Any], unit: nn.Module, _: Any, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            self._watched.after_forward()
            for each in self._of_step:
                each.check()
        given, self._given = self._given, {}
        call, self._recorded = self._recorded, None  # nodes hold hooks of this object, past Python's collector
        made = []
        for number, node, tensor in _differentiable(output) if torch.is_grad_enabled() else ():
            if given.get(id(tensor)) != number:
                made.append(tensor)
                if call is not None and node is not None:
                    call.returned.append(node)
        fsdp(unit, (), tuple(made))

    def _end_backward(self, _: Tensor) -> None:
        for group in reversed(self._groups):
            group.post_backward()


_LEAF = -1


def _differentiable(value: Any) -> list[tuple[int, Node, Tensor]]:
    """The tensors that need gradients, and those that they are views of, with the nodes that made them.

    Nodes have numbers, in the order in which a thread records them.
    """
    found = {}
    with torch._C.DisableTorchFunction():
        for tensor in tree.tensors(value):
            if tensor.requires_grad:
                node, base = tensor.grad_fn, tensor._base
                found[id(tensor)] = _LEAF if node is None else node._sequence_nr(), node, tensor
                if base is not None and base.grad_fn is not None:
                    found[id(base)] = base.grad_fn._sequence_nr(), base.grad_fn, base
    return [*found.values()]


def _hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Hook a tensor's gradient, before the hooks that it has: the unit that made it would gather others meanwhile."""
    with torch._C.DisableTorchFunction():
        tensor.register_hook(hook)
        hooks: Any = tensor._backward_hooks
    for key in [*hooks][:-1]:
        hooks[key] = hooks.pop(key)
