"""Find the state that user code keeps outside of instances: module globals, class attributes, function attributes.

The search starts at a class and follows the names that its functions use, through functions, classes and Python modules
of the same package. So it finds a user's global counter, cache or list of losses, but no internal state of libraries.
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
"""Top-level packages whose classes and functions aren't searched."""
_OUTSIDE_STEPS = {"__init__", "setup", "prepare_data", "configure_model", "configure_optimizers"}
"""Methods that aren't searched, like ``*_dataloader`` hooks: what they use is training data, or settings."""
_NOT_DATA = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)


@dataclass(frozen=True, eq=False)
class Namespace:
    """One holder of user state: the globals of a Python module, or the attributes of a class or function.

    Attributes:
        name: Name of the Python module, class or function.
        holder: The class or function; for a Python module the dict of its globals. That dict isn't always the one in
            ``sys.modules``: in a spawned process, the functions of the main script have a copy of it.
        names: The names that code uses; ``None`` for all names, as for classes and functions.
    """

    name: str
    holder: Any
    names: frozenset[str] | None = None

    @property
    def held(self) -> dict[str, Any]:
        """Name to value, for values that are data; default values of a function's parameters too."""
        own: Mapping[str, Any] = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        if defaults := getattr(self.holder, "__defaults__", None):
            own = {**own, **{f"default {number}": default for number, default in enumerate(defaults)}}
        if not own:  # as most functions
            return {}
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
    """The namespaces that the functions of classes and of their base classes use, each once."""
    found = _Found()
    for kind in kinds:
        for base in kind.__mro__:
            found.add_class(base)
    of_modules = (Namespace(name, held, frozenset(names)) for name, held, names in found.globals.values())
    return (*of_modules, *(Namespace(f"{each.__module__}.{each.__qualname__}", each) for each in found.holders))


class _Found:
    """A search that is under way: the globals, classes and functions found so far."""

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
    """The plain functions behind a class attribute: a method, property, or decorated function."""
    accessors: tuple[Any, ...] = (value.fget, value.fset) if isinstance(value, property) else (value,)
    for each in accessors:
        function = getattr(each, "__func__", each)  # of classmethod and staticmethod
        while callable(inner := getattr(function, "__wrapped__", None)):
            function = cast(Callable[..., Any], inner)
        if isinstance(function, types.FunctionType):
            yield function


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code object, and those of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_data(key: str, held: Mapping[str, Any]) -> bool:
    if key not in held or (key.startswith("__") and key.endswith("__")):
        return False
    kind: Any = type(held[key])
    return _are_data(kind)


@functools.cache
def _are_data(kind: Any) -> bool:
    return not issubclass(kind, _NOT_DATA) and not hasattr(kind, "__get__")


def _package(value: Any) -> str:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0]
