"""What running a network changes beside gradients, put back as it was, so that it can be run anew."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.pipeline.taint import Hollow

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))
"""What every module has: its parameters, buffers, modules and hooks."""


def remember(root: nn.Module) -> Callable[[], None]:
    """Note every module's attributes and hooks, and what its buffers, other tensors and containers hold.

    Parameters are left out: a forward doesn't change them. Containers are noted one level deep, and so are those that
    forward hooks hold, to collect what they see.

    Returns:
        What puts all of it back, any number of times.
    """
    parts = [(part, dict(vars(part)), dict(part._buffers)) for part in root.modules()]
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    containers: dict[int, tuple[Any, Any]] = {}
    generators: list[tuple[torch.Generator, Tensor]] = []
    for part, attributes, buffers in parts:
        for value in (*attributes.values(), *buffers.values(), *_held_by_hooks(part)):
            if isinstance(value, Tensor) and not isinstance(value, (Hollow, nn.Parameter)):
                tensors.setdefault(id(value), (value, value.detach().clone()))
        hooks = [attributes[key] for key in _HOOKS if attributes.get(key) is not None]
        own = [value for key, value in attributes.items() if key not in _OF_TORCH]
        for value in own:
            if isinstance(value, torch.Generator):
                generators.append((value, value.get_state()))
        for value in (*hooks, *own, *_held_by_hooks(part)):
            if type(value) in (list, dict, set, OrderedDict, deque) and not _holds_parameters(value):
                containers.setdefault(id(value), (value, value.copy()))

    @torch.no_grad()
    def put_back() -> None:
        for part, attributes, buffers in parts:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for tensor, copy in tensors.values():
            tensor.__class__ = type(copy)  # it may have become unknown
            tensor.copy_(copy)
        for container, copy in containers.values():
            container.clear()
            container.extend(copy) if isinstance(container, (list, deque)) else container.update(copy)
        for generator, state in generators:
            generator.set_state(state)

    return put_back


def _holds_parameters(container: Any) -> bool:
    """As ``nn.LSTM`` lists its own: sharding changes them there, between their parts and the whole ones."""
    values = container.values() if isinstance(container, dict) else container
    return any(isinstance(value, nn.Parameter) for value in values)


def _held_by_hooks(module: nn.Module) -> Iterator[Any]:
    """The variables and attributes that a module's forward hooks can reach."""
    for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
        for cell in getattr(hook, "__closure__", None) or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        owner = getattr(hook, "__self__", hook)
        if not isinstance(owner, nn.Module):
            yield from getattr(owner, "__dict__", {}).values()
