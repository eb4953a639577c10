"""What is called of a model: containers such as a ``ModuleList`` have no forward, and hold modules that have."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the outermost ones in a container that is never called itself."""
    if type(module).forward is nn.Module.forward:
        yield from called_below(module)
    else:
        yield module


def called_below(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below ``root`` that have a forward, and parameters."""
    for child in root.children():
        if any(True for _ in child.parameters()):
            yield from with_forward(child)
