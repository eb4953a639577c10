"""The plain-Python state of a module: all that its code can change beside parameters.

From its modules' attributes on: nested containers, objects that hang off it (meters, queues, schedules), what hooks and
other functions hold in closures, tensors, arrays and generators; and what its classes' code keeps beside objects, under
global names and as attributes of classes and functions. Objects of torch, Lightning and the standard library
aren't looked into: they are machinery, or lead to it (the Trainer, process groups, loggers' threads).
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from itertools import islice
from operator import is_
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.namespaces import Namespace, is_machinery, namespaces
from lightning_shard.plugin.steps.randomness import OwnGenerator

STAND_INS = frozenset({"forward", "log", "parameters", "named_parameters", "get_parameter", "state_dict", "compute"})
"""Names of a module's attributes that stand in for methods."""
CONTAINERS = (dict, list, set, collections.deque)
_HANDED_ON = (tuple, frozenset)
_LEAVES = (Tensor, np.ndarray, *OwnGenerator.__args__)
_OBJECTS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
_NOT_STATE = ("_parameters", "_modules")
"""Of a module: sharding exchanges the former's entries in a forward; the latter's are looked at each for itself."""


def reachable(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Each object that may change, once, with the first path to it; the same on every stage.

    Modules, other objects, containers, cells of closures, tensors (parameters too), arrays and generators, namespaces.
    """
    yield from _reached([*root.named_modules(), *((each.name, each) for each in beside(root))])


def beside(root: nn.Module) -> tuple[Namespace, ...]:
    """What the code of a module's classes keeps beside objects."""
    kinds: dict[Any, None] = dict.fromkeys(type(module) for module in root.modules())
    return namespaces(*kinds)


def below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What can be reached from one attribute, and itself; modules, and what is below them, are left out."""
    return _reached([(path, value)], enters_modules=False)


def _reached(begin: Iterable[tuple[str, Any]], *, enters_modules: bool = True) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}  # with the objects, so that no id is taken twice
    waiting: collections.deque[tuple[str, Any]] = collections.deque(begin)
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen or (isinstance(value, nn.Module) and not enters_modules):
            continue
        seen[id(value)] = value
        if isinstance(value, (nn.Module, Namespace, *_LEAVES, *CONTAINERS, types.CellType)) or is_object(value):
            yield path, value
        waiting.extend((f"{path}.{key}" if path else key, child) for key, child in children(value) if _matters(child))


def own_generators(root: nn.Module) -> dict[str, OwnGenerator]:
    """The generators that a module draws from beside the global ones, by their paths.

    Raises:
        StepError: One draws from the operating system, so on each stage differently.
    """
    found = {path: value for path, value in reachable(root) if isinstance(value, OwnGenerator)}
    for path, value in found.items():
        if isinstance(value, random.SystemRandom):
            raise StepError(
                f"{path} is a random.SystemRandom, which can't be seeded, so each pipeline stage would draw other"
                " numbers: use random.Random, or pipeline_parallel_size=1."
            )
    return found


def is_object(value: Any) -> bool:
    """Whether it is an object of a class whose attributes are looked into; a module isn't."""
    return _has_state(cast(Any, type(value)))


@functools.cache
def _has_state(kind: Any) -> bool:
    if issubclass(kind, (type, Enum, nn.Module, types.ModuleType, *_LEAVES, *CONTAINERS, *_HANDED_ON)):
        return False
    return kind in _OBJECTS or (not is_machinery(kind) and (kind.__dictoffset__ != 0 or bool(slots(kind))))


def attributes(value: Any) -> dict[str, Any]:
    """An object's, or a module's own."""
    named = {name: getattr(value, name) for name in slots(value.__class__) if hasattr(value, name)}
    return named | {key: v for key, v in getattr(value, "__dict__", {}).items() if key not in _NOT_STATE}


def entries(container: Any, most: int | None = None) -> list[Any]:
    """What a container holds, of a dict its values; the first ``most`` of them."""
    return [*islice(dict.values(container) if isinstance(container, dict) else container, most)]


def hold_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether they hold the same objects, in the same order."""
    if len(one) != len(other):
        return False
    return not one or ([*one] == [*other] and all(map(is_, one.values(), other.values())))


@functools.cache
def slots(kind: Any) -> list[str]:
    named = (name for base in kind.__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ())))
    return [name for name in named if not name.startswith("__")]


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """What is looked into from one of :func:`reachable`, and plain values, by their names there."""
    if isinstance(value, nn.Module):
        yield from value._modules.items()
        yield from value._parameters.items()
        yield from attributes(value).items()
    elif isinstance(value, Namespace):
        yield from value.held.items()
    elif isinstance(value, dict):
        yield from ((str(key), child) for key, child in dict.items(value))
    elif isinstance(value, (list, collections.deque, tuple)):
        yield from ((str(place), child) for place, child in enumerate(value))
    elif isinstance(value, types.CellType):
        with suppress(ValueError):  # not assigned yet
            yield "cell", value.cell_contents
    elif isinstance(value, types.FunctionType):
        if not is_machinery(value):
            yield from zip(value.__code__.co_freevars, value.__closure__ or ())
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("function", value.func), ("args", value.args), ("keywords", value.keywords))
    elif is_object(value):
        yield from attributes(value).items()


def _matters(value: Any) -> bool:
    return value is not None and type(value) not in (bool, int, float, str, bytes, complex)


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
