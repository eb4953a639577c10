"""Walks the plain-Python state of a module: everything that its code can change other than parameters.

The walk starts from the attributes of all submodules. It covers nested containers, objects of the user's classes
(meters, queues, schedules), variables in closures of hooks and other functions, tensors, arrays and generators; and
state outside of objects: globals, and attributes of classes and functions, that the code of the module's classes uses.
Objects of torch, Lightning and the standard library aren't entered: they are machinery, or lead to it (the Trainer,
process groups, loggers' threads).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import math
import random
import types
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.namespaces import Code, Namespace, begin_at, is_machinery, is_own, namespaces, package_of

OwnGenerator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
"""Types of generators other than the global ones."""
PLAIN_OBJECTS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
"""Classes of the standard library whose objects hold a user's values."""
OF_RECURRENT_LAYERS = ("_flat_weights", "_flat_weight_refs")
"""In which nn.LSTM and others keep their parameters, which sharding replaces in a forward."""
STAND_INS = frozenset(
    {"forward", "log", "print", "parameters", "named_parameters", "get_parameter", "state_dict", "compute"}
    | {"requires_grad_", "zero_grad", "freeze", "unfreeze"}
)
"""Module attributes that may shadow a method of that name."""
CONTAINERS = (dict, list, set, collections.deque)
_HANDED_ON = (tuple, frozenset)
LEAVES = (Tensor, np.ndarray, *OwnGenerator.__args__)
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, complex})
_BEGINS: WeakKeyDictionary[nn.Module, dict[Any, None]] = WeakKeyDictionary()
"""What the last search of a module began at, beside the classes of its submodules."""
_NOT_STATE = ("_parameters", "_modules", *OF_RECURRENT_LAYERS)
"""Excluded from a module's attributes: sharding replaces parameters in a forward; submodules are visited themselves."""


def reachable(root: nn.Module) -> list[tuple[str, Any]]:
    """Each object that may change, once, with the first path to it; the same order on every stage.

    Returns modules, other objects, containers, closure cells, tensors (parameters too), arrays, generators; and the
    namespaces that code of the submodules' classes, and of the user's objects and functions, uses. Namespaces and
    objects may each lead to more of the other, so it walks until there are no more. What the last search began at is
    remembered: mostly one walk is enough then.
    """
    package = package_of(type(root))
    of_modules = _kinds(root)
    of_objects = _BEGINS.get(root, {})
    while True:
        outside = namespaces(*of_modules, *sorted(of_objects.keys() - of_modules.keys(), key=_name_of))
        begins: dict[Any, None] = {}
        found = _reached([*root.named_modules(), *((each.name, each) for each in outside)], package, begins)
        if not begins.keys() - of_modules.keys() - of_objects.keys():
            _BEGINS[root] = of_objects
            return found
        of_objects = of_objects | begins


def beside_classes(root: nn.Module) -> tuple[Namespace, ...]:
    """The namespaces that the code of a module's and its submodules' classes uses, such as steps and forwards."""
    return namespaces(*_kinds(root))


def _kinds(root: nn.Module) -> dict[Any, None]:
    return dict.fromkeys(type(module) for module in root.modules())


def _name_of(begin: Any) -> tuple[str, str, int]:
    """By which classes and functions are ordered, equally on every stage."""
    if isinstance(begin, Code):
        return begin.code.co_filename, begin.code.co_qualname, begin.code.co_firstlineno
    return str(begin.__module__), begin.__qualname__, 0


def below(path: str, value: Any, most: float = math.inf) -> list[tuple[str, Any]]:
    """An attribute's value and what is reachable from it, ``most`` objects, but for modules and what is below them."""
    return _reached([(path, value)], enters_modules=False, most=most)


def _reached(
    begin: Iterable[tuple[str, Any]],
    package: str = "",
    begins: dict[Any, None] | None = None,
    *,
    enters_modules: bool = True,
    most: float = math.inf,
) -> list[tuple[str, Any]]:
    """
    Args:
        begins: Filled with the classes of objects, and with functions, whose code may use namespaces: the user's own,
            and those of a package.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
    found: list[tuple[str, Any]] = []
    waiting: collections.deque[tuple[str, Any]] = collections.deque(begin)
    while waiting and len(found) < most:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        kind: Any = type(value)
        may_change, entries_of = _way_of(kind)
        if entries_of is _of_module and not enters_modules:
            continue
        seen[id(value)] = value
        if begins is not None:
            if kind is types.FunctionType:
                if is_own(value) or package_of(value) == package:
                    begins[begin_at(value)] = None
            elif _is_of(kind, package):
                begins[kind] = None
        if may_change:
            found.append((path, value))
        if entries_of is not None:
            prefix = f"{path}." if path else ""
            for key, child in entries_of(value):
                if type(child) not in _PLAIN:
                    waiting.append((f"{prefix}{key}", child))
    return found


@functools.cache
def _is_of(kind: Any, package: str) -> bool:
    if is_machinery(kind) or issubclass(kind, (type, types.ModuleType)):
        return False
    return is_own(kind) or package_of(kind) == package


def own_generators(root: nn.Module) -> dict[str, OwnGenerator]:
    """A module's own generators, by path: those that it draws from other than the global ones.

    Raises:
        StepError: One draws from the operating system, so each stage would draw other numbers.
    """
    found = {path: value for path, value in reachable(root) if isinstance(value, OwnGenerator)}
    for path, value in found.items():
        if isinstance(value, random.SystemRandom):
            raise StepError(
                f"{path} is a random.SystemRandom, which can't be seeded, so each pipeline stage would draw other"
                " numbers: use random.Random, or pipeline_parallel_size=1.",
                breaks=7,
            )
    return found


def is_object(value: Any) -> bool:
    """Whether the walk enters the attributes of this object; ``False`` for modules, which are handled separately."""
    kind: Any = type(value)
    return _has_state(kind)


@functools.cache
def _has_state(kind: Any) -> bool:
    if issubclass(kind, (type, Enum, nn.Module, types.ModuleType, *LEAVES, *CONTAINERS, *_HANDED_ON)):
        return False
    return kind in PLAIN_OBJECTS or (not is_machinery(kind) and (kind.__dictoffset__ != 0 or bool(slots(kind))))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, or of a module itself, slots included."""
    held = {key: v for key, v in getattr(value, "__dict__", {}).items() if key not in _NOT_STATE}
    found = {}
    for name in slots(value.__class__):
        with contextlib.suppress(AttributeError):  # not set; a __getattr__ isn't asked, which may compute, or raise
            found[name] = object.__getattribute__(value, name)
    return found | held


def entries(value: Any) -> dict[Any, Any]:
    """What an object itself holds: a copy, by key, attribute, name, or place; of a module without submodules.

    Uses builtin types' own methods: those of a derived class may have side effects.
    """
    builtin = _builtin(value)
    if builtin is not None:
        return dict(builtin.items(value) if issubclass(builtin, dict) else enumerate(builtin.__iter__(value)))
    if isinstance(value, Namespace):
        return value.held
    return dict(_of_cell(value)) if isinstance(value, types.CellType) else attributes(value)


def put_entry(value: Any, key: Any, entry: Any) -> None:
    """Replace what an object holds under one of the keys of its :func:`entries`; not in sets."""
    if isinstance(value, Namespace):
        value.put(key, entry)
    elif isinstance(value, types.CellType):
        value.cell_contents = entry
    elif (builtin := _builtin(value)) is not None:
        builtin.__setitem__(value, key, entry)
    elif key in slots(value.__class__):
        object.__setattr__(value, key, entry)
    else:
        vars(value)[key] = entry


def put_entries(value: Any, held: dict[Any, Any]) -> None:
    """Have an object hold what its :func:`entries` were."""
    builtin = _builtin(value)
    if builtin is not None:
        builtin.clear(value)
        fill = builtin.update if issubclass(builtin, (dict, set)) else builtin.extend
        fill(value, held if issubclass(builtin, dict) else held.values())
        return
    now = entries(value)
    for key in now.keys() - held.keys():
        if isinstance(value, Namespace):
            value.remove(key)
        elif isinstance(value, types.CellType):
            del value.cell_contents
        elif key in slots(value.__class__):
            object.__delattr__(value, key)
        else:
            del vars(value)[key]
    for key, old in held.items():
        if now.get(key, held) is not old:
            put_entry(value, key, old)


def _builtin(value: Any) -> Any:
    """The builtin type of a container."""
    kind: Any = type(value)
    return _builtin_of(kind)


@functools.cache
def _builtin_of(kind: Any) -> Any:
    return next((each for each in (collections.OrderedDict, *CONTAINERS, tuple) if issubclass(kind, each)), None)


def hold_same(one: dict[Any, Any], other: dict[Any, Any], *, in_order: bool = True) -> bool:
    """Whether two dicts hold the same objects under the same keys, in the same order."""
    if len(one) != len(other):
        return False
    if not in_order:
        return all(other.get(key, other) is value for key, value in one.items())
    return all(map(is_, one.values(), other.values())) and (all(map(is_, one, other)) or _are_equal([*one], [*other]))


def _are_equal(keys: list[Any], others: list[Any]) -> bool:
    """Of lists' entries; parameters that are keys are compared by identity, which differs here."""
    return not any(isinstance(key, Tensor) for key in (*keys, *others)) and keys == others


@functools.cache
def slots(kind: Any) -> list[str]:
    named = (name for base in kind.__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ())))
    return [name for name in named if not name.startswith("__")]


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """The objects that the walk enters from an object of :func:`reachable`, and plain values, by name."""
    kind: Any = type(value)
    _, entries_of = _way_of(kind)
    return entries_of(value) if entries_of is not None else ()


@functools.cache
def _way_of(kind: Any) -> tuple[bool, Callable[[Any], Iterable[tuple[Any, Any]]] | None]:
    """Whether objects of a type may change, and what the walk enters from one; of each type once, for speed."""
    for kinds, may_change, entries_of in _WAYS:
        if issubclass(kind, kinds):
            return may_change, entries_of
    return (True, _of_object) if _has_state(kind) else (False, None)


def _of_module(module: nn.Module) -> Iterable[tuple[str, Any]]:
    return chain(module._modules.items(), module._parameters.items(), attributes(module).items())


def _of_object(value: Any) -> Iterable[tuple[str, Any]]:
    return attributes(value).items()


def _of_cell(cell: types.CellType) -> Iterable[tuple[str, Any]]:
    try:
        return [("cell", cell.cell_contents)]
    except ValueError:  # not assigned yet
        return ()


def _of_function(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    return () if is_machinery(function) else zip(function.__code__.co_freevars, function.__closure__ or ())


def _of_partial(call: functools.partial[Any]) -> Iterable[tuple[str, Any]]:
    if str(getattr(call.func, "__module__", "")).startswith("lightning_shard."):  # a hook of ours
        return ()
    return ("function", call.func), ("args", call.args), ("keywords", call.keywords)


_WAYS: list[tuple[Any, bool, Callable[[Any], Iterable[tuple[Any, Any]]] | None]] = [
    (nn.Module, True, _of_module),
    (Namespace, True, lambda namespace: namespace.held.items()),
    (LEAVES, True, None),
    (dict, True, dict.items),
    ((list, collections.deque), True, enumerate),
    (set, True, None),
    (tuple, False, enumerate),
    (types.CellType, True, _of_cell),
    (types.FunctionType, False, _of_function),
    (types.MethodType, False, lambda method: (("self", method.__self__), ("function", method.__func__))),
    (functools.partial, False, _of_partial),
]


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
