"""Find the state that user code keeps outside of instances: module globals, class attributes, function attributes.

The search starts at classes and functions, and follows the names that their code uses through functions, classes and
Python modules: those of the same package, and those in any file of the user's that isn't installed as a package is. So
it finds a user's global counter, cache or list of losses, but no internal state of libraries.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_MACHINERY = sys.stdlib_module_names - {"__main__"} | {
    *("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
    *("lightning_shard", "numpy", "functorch", "fsspec", "mlflow", "wandb"),
}
"""Top-level packages whose classes and functions aren't searched."""
_OUTSIDE_STEPS = {"__init__", "setup", "prepare_data", "configure_model", "configure_optimizers"}
"""Methods that aren't searched, like ``*_dataloader`` hooks: what they use is training data, or settings."""
_INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that aren't the user's own files."""
_CELL = "cell "
"""Before the names of a function's closed-over variables in its namespace; these are entered as cells."""
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
        """Name to value, for values that are data; a function's parameters' defaults and closed-over variables too."""
        own: Mapping[str, Any] = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        if defaults := getattr(self.holder, "__defaults__", None):
            own = {**own, **{f"default {number}": default for number, default in enumerate(defaults)}}
        if cells := getattr(self.holder, "__closure__", None):
            own = {**own, **{f"{_CELL}{name}": c for name, c in zip(self.holder.__code__.co_freevars, cells)}}
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


@dataclass(frozen=True)
class Code:
    """A function that may be made anew any time, as lambdas are: its code and the globals that this uses."""

    code: types.CodeType
    globals_id: int
    globals: dict[str, Any] = field(compare=False)


def is_machinery(value: Any) -> bool:
    return package_of(value) in _MACHINERY


def is_own(value: Any) -> bool:
    """Whether a class or function is of a file of the user's, and of no installed package."""
    return _is_own_module(_module_of(value))


def begin_at(function: types.FunctionType) -> Any:
    """What :func:`namespaces` may begin at for a function that an object holds, without keeping what it closes over."""
    held = function.__globals__
    if held.get(function.__name__) is function:
        return function
    return Code(function.__code__, id(held), held)


@functools.cache
def namespaces(*begins: Any) -> tuple[Namespace, ...]:
    """The namespaces that functions use, and those of classes and of their base classes, each once."""
    found = _Found()
    for each in begins:
        if isinstance(each, Code):
            found.add_code(each.code, each.globals, each.globals.get("__name__", ""))
        elif isinstance(each, type):
            for base in each.__mro__:
                found.add_class(base)
        else:
            found.add_function(each)
    of_modules = (Namespace(name, held, frozenset(names)) for name, held, names in found.globals.values())
    return (*of_modules, *(Namespace(f"{each.__module__}.{each.__qualname__}", each) for each in found.holders))


class _Found:
    """A search that is under way: the globals, classes and functions found so far."""

    def __init__(self) -> None:
        self.globals: dict[int, tuple[str, dict[str, Any], set[str]]] = {}
        self.holders: list[Any] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._looked_at: set[tuple[int, str | frozenset[str]]] = set()  # a name, or names, by the id of the globals

    def add_class(self, kind: Any) -> None:
        if is_machinery(kind) or not self._is_new(kind):
            return
        self.holders.append(kind)
        for name, value in list(vars(kind).items()):
            runs_in_steps = name not in _OUTSIDE_STEPS and not name.endswith("_dataloader")
            if runs_in_steps and not (name.startswith("__") and isinstance(value, type)):
                self._add(value, package_of(kind))

    def add_function(self, function: types.FunctionType) -> None:
        module = _module_of(function)
        if module.partition(".")[0] in _MACHINERY or not self._is_new(function):
            return
        self.holders.append(function)
        self.add_code(function.__code__, function.__globals__, module)

    def add_code(self, code: types.CodeType, held: dict[str, Any], module: str) -> None:
        self._add_used(module, held, frozenset(name for each in _codes(code) for name in each.co_names))

    def _add(self, value: Any, package: str) -> None:
        """A class, or the functions behind a method, property, or what a decorator made of them."""
        for each in _callables(value):
            if not (_module_of(each).partition(".")[0] == package or is_own(each)):
                continue
            if not isinstance(each, type):
                self.add_function(each)
            elif id(each) not in self._seen:
                for base in each.__mro__:
                    if base is each or is_own(base):
                        self.add_class(base)

    def _add_used(self, module: str, held: dict[str, Any], used: frozenset[str]) -> None:
        if not self._is_first_look(held, used):
            return
        package = module.partition(".")[0]
        for name in sorted(used):  # the same order in each process
            if name not in held:
                self._add_imported(module, name, used)
                continue
            value = held[name]
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] == package or _is_own_module(value.__name__):
                    self._add_used(value.__name__, vars(value), used)
            elif self._is_first_look(held, name):
                self._add(value, package)
                if _is_data(name, held):
                    self.globals.setdefault(id(held), (module, held, set()))[2].add(name)

    def _add_imported(self, module: str, name: str, used: frozenset[str]) -> None:
        """A Python module that a function itself imports, if it is one that was imported before."""
        for each in (name, f"{module.rpartition('.')[0]}.{name}"):
            if each in sys.modules and _is_own_module(each):
                self._add_used(each, vars(sys.modules[each]), used)

    def _is_first_look(self, held: dict[str, Any], name: str | frozenset[str]) -> bool:
        is_first = (id(held), name) not in self._looked_at
        self._looked_at.add((id(held), name))
        return is_first

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new


def _callables(value: Any) -> Iterator[Any]:
    """A class, or the plain functions behind a class attribute or global, through decorators' closures too.

    Asks no ``__getattr__``.
    """
    waiting, seen = [value], {}
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, type):
            yield each
        elif isinstance(each, property):
            waiting += [each.fget, each.fset, each.fdel]
        elif isinstance(each, (functools.partial, functools.partialmethod, functools.cached_property)):
            waiting.append(each.func)
        else:
            if isinstance(each, types.FunctionType):
                yield each
                waiting += _closed_over(each)
            if isinstance(each, (types.MethodType, classmethod, staticmethod)):
                waiting.append(each.__func__)
            waiting.append((getattr(each, "__dict__", None) or {}).get("__wrapped__"))


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(content, (type, types.FunctionType, types.MethodType, classmethod, staticmethod)):
            yield content


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


def package_of(value: Any) -> str:
    """The package of a class or function; functions that code has made of texts may have none."""
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0]


def _module_of(value: Any) -> str:
    """The name of the Python module of a class or function; of one that wraps another, that of its own code."""
    own = value.__globals__.get("__name__") if isinstance(value, types.FunctionType) else None
    return str(own or getattr(value, "__module__", None) or "builtins")


def _is_own_module(name: str) -> bool:
    if name.partition(".")[0] in _MACHINERY:
        return False
    if name in ("__main__", "__mp_main__"):
        return True
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    return file is not None and not any(folder in file for folder in _INSTALLED)
