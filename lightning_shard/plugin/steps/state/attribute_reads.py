"""Notices when attributes of one module are read or set, by a subclass of its own with a property for each of them.

Such a class equals the module's own and has its hash: ``type(module) == Net`` and ``{Net: …}[type(module)]`` are as
they were. ``type(module) is Net`` isn't, so modules are watched in a first step only, but for a few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

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
    new: Any = _alike(cast(Any, type(plain)))(plain.__name__, (plain,), {"_watched": watched, "__module__": plain.__module__})
    for name in watched:
        setattr(new, name, _watched(new, name, read, written))
    new.__qualname__ = plain.__qualname__
    module.__class__ = new


@cache
def _alike(kind_of_kind: Any) -> Any:
    """A metaclass whose classes equal their first base, and have its hash."""

    def equals(kind: Any, other: Any) -> bool:
        return other is kind or kind.__bases__[0] == other

    def hash_(kind: Any) -> int:
        return hash(kind.__bases__[0])

    return type("Alike", (kind_of_kind,), {"__eq__": equals, "__hash__": hash_})


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
