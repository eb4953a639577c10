"""Notices when attributes of one module are read or set, by a subclass of its own with a property for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def watch(module: nn.Module, watched: set[str], read: Callable[[str], None], written: Callable[[str], None]) -> None:
    """Call ``read`` or ``written`` when these attributes of a module are read or set; none: stop watching."""
    kind: Any = type(module)
    plain = kind.__bases__[0] if "_watched" in vars(kind) else kind
    if watched == vars(kind).get("_watched", set()):
        return
    if not watched:
        module.__class__ = plain
        return
    new: Any = type(plain.__name__, (plain,), {"_watched": watched, "__module__": plain.__module__})
    for name in watched:
        setattr(new, name, _watched(new, name, read, written))
    new.__qualname__ = plain.__qualname__
    module.__class__ = new


def _watched(kind: Any, name: str, read: Callable[[str], None], written: Callable[[str], None]) -> property:
    def get(self: Any) -> Any:
        read(name)
        held = vars(self)
        return held[name] if name in held else getattr(super(kind, self), name)

    def set_(self: Any, value: Any) -> None:
        vars(self)[name] = value
        written(name)

    def delete(self: Any) -> None:
        if name not in vars(self):
            raise AttributeError(name)
        del vars(self)[name]

    return property(get, set_, delete)
