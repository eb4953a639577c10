"""Modules made by ``torch.jit.script`` or ``trace``, many of whose methods fail: they aren't sharded or cut.

One around the blocks is whole on every rank and stage, and computes there as it would alone. One in a block may have
buffers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from lightning_shard.errors import ConfigurationError


def is_scripted(module: nn.Module) -> bool:
    return isinstance(module, ScriptModule)


def refuse_trained(root: nn.Module) -> None:
    """
    Raises:
        ConfigurationError: A scripted module has a parameter that is trained.
    """
    for name, module in root.named_modules():
        trained = next((inner for inner, each in module.named_parameters() if each.requires_grad), None)
        if is_scripted(module) and trained is not None:
            raise ConfigurationError(
                f"{name} was made by torch.jit, and {name}.{trained} is trained, but parameters of such modules can't"
                " be sharded: give the plain module, with compile_blocks=True for speed, or freeze its parameters"
                " before training starts."
            )


def before_calls(module: nn.Module, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
    """Register a forward pre-hook on any module: calls of scripted ones run hooks, though their method refuses."""
    return nn.Module.register_forward_pre_hook(module, hook, **options)


def after_calls(module: nn.Module, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
    """Register a forward hook on any module, as :func:`before_calls`."""
    return nn.Module.register_forward_hook(module, hook, **options)


@contextmanager
def set_aside(root: nn.Module) -> Iterator[None]:
    """Have ``root`` lack its scripted modules inside the context, each ``None`` in its place."""
    held = [
        (parent._modules, name, child)
        for parent in root.modules()
        if not is_scripted(parent)
        for name, child in parent._modules.items()
        if child is not None and is_scripted(child)
    ]
    for children, name, _ in held:
        children[name] = None
    try:
        yield
    finally:
        for children, name, child in held:
            children[name] = child
