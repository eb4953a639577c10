"""Find the modules that are called, past containers without a forward of their own, such as ``ModuleList``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward of its own; containers don't."""
    return type(module).forward is not nn.Module.forward


def with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself; for a container without a forward, the outermost modules in it that have one."""
    if has_forward(module):
        yield module
    else:
        yield from called_below(module)


def called_below(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below ``root`` that have a forward and hold parameters."""
    for child in root.children():
        if any(True for _ in child.parameters()):
            yield from with_forward(child)


def slots_of(root: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every module and attribute name that holds a parameter, in a fixed order; tied parameters have several."""
    return [(module, key) for module in root.modules() for key, p in module._parameters.items() if p is not None]
