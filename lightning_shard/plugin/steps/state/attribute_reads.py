"""Notices when attributes of a module are read or set, by a subclass of its own with a property for each of them.

The module is an object of it only while it is watched. The class equals the module's own and has its hash:
``type(module) == Net`` and ``{Net: …}[type(module)]`` are as they were; ``type(module) is Net`` isn't. The user's code
that is called for each subclass (``__init_subclass__``, a metaclass), such as a registry's, isn't called for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, cast

from torch import nn

from lightning_shard.namespaces import is_machinery
from lightning_shard.subclasses import unannounced_base


class Watched:
    """One module.

    Args:
        names: Of the attributes.
        read: Called with the name of one that is read.
        written: Called with the name of one that is set.
    """

    def __init__(
        self, module: nn.Module, names: Collection[str], read: Callable[[str], None], written: Callable[[str], None]
    ) -> None:
        self._module = module
        self._properties = {name: (name, read, written) for name in names}
        self._plain: Any = None
        self._kind: Any = None

    def begin(self) -> None:
        if type(self._module) is not self._plain:  # at first, and where a parametrization has set another class since
            self._plain = type(self._module)
            self._kind = self._kind_of(self._plain)
        self._module.__class__ = self._kind

    def end(self) -> None:
        if type(self._module) is self._kind:
            self._module.__class__ = self._plain

    def _kind_of(self, plain: Any) -> Any:
        make = _alike(cast(Any, type(plain)))
        kind = make(plain.__name__, (unannounced_base(plain), plain), {"__module__": plain.__module__})
        kind.__qualname__ = plain.__qualname__
        for name, arguments in self._properties.items():
            setattr(kind, name, _noticed(kind, *arguments))
        return kind


@cache
def _alike(kind_of_kind: Any) -> Any:
    """A metaclass whose classes equal their last base, and have its hash; it makes them without the user's code."""
    plain: Any = next(kind for kind in kind_of_kind.__mro__ if is_machinery(kind))  # at the latest `type`

    def new(kind_of: Any, *arguments: Any) -> Any:
        return plain.__new__(kind_of, *arguments)

    def init(kind: Any, *arguments: Any) -> None:
        plain.__init__(kind, *arguments)

    def equals(kind: Any, other: Any) -> bool:
        return other is kind or kind.__bases__[-1] == other

    def hash_(kind: Any) -> int:
        return hash(kind.__bases__[-1])

    return type("Alike", (kind_of_kind,), {"__new__": new, "__init__": init, "__eq__": equals, "__hash__": hash_})


def _noticed(kind: Any, name: str, read: Callable[[str], None], written: Callable[[str], None]) -> property:
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
