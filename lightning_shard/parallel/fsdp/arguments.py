"""Give units of FSDP2's the objects that their caller passes: containers of any class, and tensors.

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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.parallel.fsdp.units import groups_of, state_of


def pass_arguments_on(units: Iterable[nn.Module]) -> None:
    """Make units get the caller's own arguments, in place."""
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")  # bases begin backwards too
    for unit in units:
        call, state = _Call(unit), state_of(unit)
        before, after = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        unit._forward_pre_hooks[before] = partial(call.begins, unit._forward_pre_hooks[before])
        unit._forward_hooks[after] = partial(call.ends, unit._forward_hooks[after])


class _Call:
    """What a unit's call does in place of FSDP2's own hooks, which it calls."""

    def __init__(self, unit: nn.Module) -> None:
        self._state = state_of(unit)
        self._groups = [*groups_of(unit)]
        self._given: dict[int, int] = {}  # numbers of the arguments' nodes before the call, by ids of tensors

    def begins(self, fsdp: Callable[..., Any], unit: nn.Module, args: Any, kwargs: Any) -> Any:
        runs_again = self._state._training_state.name == "PRE_BACKWARD"  # in a checkpoint, whose graph isn't used
        given = _differentiable((args, kwargs)) if torch.is_grad_enabled() and not runs_again else []
        self._given = {id(tensor): number for number, tensor in given}
        number, newest = max(given, key=lambda each: each[0], default=(_LEAF, None))
        if newest is None or number != _LEAF:
            fsdp(unit, (), {})
            if newest is not None:
                _hook_first(newest, self._end_backward)
            return None
        both = (*args, *kwargs.values())
        views, _ = fsdp(unit, tuple(each if isinstance(each, Tensor) else None for each in both), {})
        own = [each if view is None else view for each, view in zip(both, views)]
        return tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :]))

    def ends(self, fsdp: Callable[..., Any], unit: nn.Module, _: Any, output: Any) -> None:
        given, self._given = self._given, {}
        made = _differentiable(output) if torch.is_grad_enabled() else []
        fsdp(unit, (), tuple(tensor for number, tensor in made if given.get(id(tensor)) != number))

    def _end_backward(self, _: Tensor) -> None:
        for group in reversed(self._groups):
            group.post_backward()


_LEAF = -1


def _differentiable(value: Any) -> list[tuple[int, Tensor]]:
    """The tensors that need gradients, and those that they are views of, with the numbers of the nodes that made them.

    Nodes are numbered in the order in which a thread records them.
    """
    found = {}
    with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
        for tensor in tree.tensors(value):
            if tensor.requires_grad:
                node, base = tensor.grad_fn, tensor._base
                found[id(tensor)] = _LEAF if node is None else node._sequence_nr(), tensor
                if base is not None and base.grad_fn is not None:
                    found[id(base)] = base.grad_fn._sequence_nr(), base
    return [*found.values()]


def _hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Hook a tensor's gradient, before the hooks that it has: the unit that made it would gather others meanwhile."""
    with torch._C.DisableTorchFunction():
        tensor.register_hook(hook)
        hooks: Any = tensor._backward_hooks
    for key in [*hooks][:-1]:
        hooks[key] = hooks.pop(key)
