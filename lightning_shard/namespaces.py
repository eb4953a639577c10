"""State that code keeps outside of objects: attributes of classes and of functions, globals of Python modules.

Found from a class, by the names that its functions use, and the functions and classes that they use, as far as these
are of the same package. So a counter, a cache or a list of losses is found, and none of what a library keeps for
itself.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

_MACHINERY = sys.stdlib_module_names - {"__main__"} | {
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
    *("lightning_shard", "numpy", "functorch", "fsspec"),
}
"""Packages of whose classes and functions the insides are left alone."""
_OUTSIDE_STEPS = {"__init__", "setup", "prepare_data", "configure_model", "configure_optimizers"}
"""And hooks that give loaders: what these use is data to train on, or settings."""
_NOT_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


@dataclass(frozen=True, eq=False)
class Namespace:
    """What code of a user's keeps under global names, or as attributes of one class or function.

    Attributes:
        name: The Python module's, the class's or the function's.
        holder: The class or function; of a Python module its globals, which aren't always those that ``sys.modules``
            has under its name: a script's, in a process that was spawned, are a copy there.
        names: Those that code uses; of a class or function, all that it has.
    """

    name: str
    holder: Any
    names: frozenset[str] | None = None

    @property
    def held(self) -> dict[str, Any]:
        """The data among them."""
        own: dict[str, Any] = {**(self.holder if isinstance(self.holder, dict) else vars(self.holder))}
        for number, default in enumerate(getattr(self.holder, "__defaults__", None) or ()):
            own[f"default {number}"] = default
        return {key: own[key] for key in sorted(own if self.names is None else self.names) if _is_data(key, own)}

    def put(self, key: str, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[key] = value
        else:
            setattr(self.holder, key, value)

    def remove(self, key: str) -> None:
        if isinstance(self.holder, dict):
            del self.holder[key]
        else:
            delattr(self.holder, key)


def is_machinery(value: Any) -> bool:
    return _package(value) in _MACHINERY


@functools.cache
def namespaces(*kinds: Any) -> tuple[Namespace, ...]:
    """Those that the functions of classes use, and of the classes that these are derived from; each once."""
    found = _Found()
    for kind in kinds:
        for base in kind.__mro__:
            found.add_class(base)
    of_modules = (Namespace(name, held, frozenset(names)) for name, held, names in found.globals.values())
    return (*of_modules, *(Namespace(f"{each.__module__}.{each.__qualname__}", each) for each in found.holders))


class _Found:
    def __init__(self) -> None:
        self.globals: dict[int, tuple[str, dict[str, Any], set[str]]] = {}
        self.holders: list[Any] = []
        self._seen: set[int] = set()

    def add_class(self, kind: Any) -> None:
        if is_machinery(kind) or not self._is_new(kind):
            return
        self.holders.append(kind)
        for name, value in list(vars(kind).items()):
            runs_in_steps = name not in _OUTSIDE_STEPS and not name.endswith("_dataloader")
            for function in _functions(value) if runs_in_steps else ():
                self.add_function(function)

    def add_function(self, function: types.FunctionType) -> None:
        if is_machinery(function) or not self._is_new(function):
            return
        self.holders.append(function)
        used = {name for code in _codes(function.__code__) for name in code.co_names}
        self._add_used(function.__module__, function.__globals__, used)

    def _add_used(self, module: str, held: dict[str, Any], used: set[str]) -> None:
        for name in used & held.keys():
            value = held[name]
            if _package(value) == module.partition(".")[0] and isinstance(value, (type, types.FunctionType)):
                self.add_class(value) if isinstance(value, type) else self.add_function(cast(Any, value))
            elif isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] == module.partition(".")[0] and self._is_new(value):
                    self._add_used(value.__name__, vars(value), used)
            elif _is_data(name, held):
                self.globals.setdefault(id(held), (module, held, set()))[2].add(name)

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen.add(id(value))
        return is_new


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """In an attribute of a class."""
    accessors: tuple[Any, ...] = (value.fget, value.fset) if isinstance(value, property) else (value,)
    for each in accessors:
        function = getattr(each, "__func__", each)  # of class methods and static ones
        while callable(inner := getattr(function, "__wrapped__", None)):
            function = cast(Callable[..., Any], inner)
        if isinstance(function, types.FunctionType):
            yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's, and of those defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_data(key: str, held: Mapping[str, Any]) -> bool:
    if key not in held or (key.startswith("__") and key.endswith("__")):
        return False
    value = held[key]
    return not isinstance(value, _NOT_DATA) and not hasattr(type(value), "__get__")


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0]
