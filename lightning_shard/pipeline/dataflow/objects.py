"""Mutable objects that code passes to the network or its blocks, such as caches and collectors of losses.

An object is a list, a dict, or anything with attributes but tensors, modules and functions. Its *entries* are its
items, or its attributes (``state/walk.py``). Objects in objects are found by their paths: the keys that lead to them.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.state.walk import CONTAINERS, attributes, entries, put_entry
from lightning_shard.versions import version

Path = tuple[Any, ...]
"""The attributes, keys and indices that lead to an object from the arguments of a call."""


def is_object(value: Any) -> bool:
    """Whether a value is a mutable container: a list, a dict, or an object with attributes.

    Functions aren't; an object of a class that can be called, as a graph of torch_geometric's, is.
    """
    if isinstance(value, (list, dict)):
        return True
    others = (Tensor, nn.Module, torch.Size, type)
    return hasattr(value, "__dict__") and not (isinstance(value, others) or is_function(value))


def is_function(value: Any) -> bool:
    """Whether it is a function, a method, or a partial one."""
    return inspect.isroutine(value) or isinstance(value, partial)


def holds_tensors(value: Any, depth: int = 5) -> bool:
    """Whether tensors are reached from a value that is neither a tensor, a module, a class nor a plain value."""
    if value is None or isinstance(value, (Tensor, nn.Module, type, bool, int, float, str, bytes)):
        return False
    is_container = isinstance(value, (tuple, *CONTAINERS))
    held = [*(entries(value) if is_container else attributes(value)).values()]
    return any(isinstance(each, Tensor) or (depth and holds_tensors(each, depth - 1)) for each in held)


def objects(
    value: Any, path: Path = (), seen: set[int] | None = None, *, deepest: int | None = None
) -> Iterator[tuple[Path, Any]]:
    """Yield every reachable object once, with the first path to it; none whose path is longer than ``deepest``."""
    seen = set() if seen is None else seen
    if is_object(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield path, value
    elif not isinstance(value, tuple):
        return
    if len(path) == deepest:
        return
    for key, child in entries(value).items():
        yield from objects(child, (*path, key), seen, deepest=deepest)


_WRITTEN = (Tensor, np.ndarray)


class Noted:
    """An object, and what it held when it was noted.

    Args:
        version_of: Gives what a write in place changes of a tensor, or an array.

    Attributes:
        held: Its entries.
        versions: Of the tensors and arrays among the entries.
    """

    def __init__(self, value: Any, version_of: Callable[[Any], Any] = version) -> None:
        self.value, self.held, self._version_of = value, entries(value), version_of
        self.versions = {key: version_of(each) for key, each in self.held.items() if isinstance(each, _WRITTEN)}

    def written(self) -> list[Any]:
        """The keys of tensors that were written to in place since, whether or not they are still there."""
        return [key for key in self._written() if isinstance(self.held[key], Tensor)]

    def changed(self) -> dict[Any, Any]:
        """The entries that were set or written to since."""
        absent, written = object(), self._written()
        return {
            key: each
            for key, each in entries(self.value).items()
            if key in written or not tree.same_entries([self.held.get(key, absent)], [each])
        }

    def _written(self) -> list[Any]:
        return [key for key, before in self.versions.items() if self._version_of(self.held[key]) != before]


def at(value: Any, path: Path) -> Any:
    """What is at a path."""
    for key in path:
        value = entries(value)[key]
    return value


def set_entry(value: Any, key: Any, entry: Any) -> None:
    """Set an entry of an object; of a list also the one after the last.

    Raises:
        IndexError: A list is shorter.
    """
    if isinstance(value, list):
        if key > len(value):
            raise IndexError(key)
        value[key : key + 1] = [entry]
    elif isinstance(value, dict):
        value[key] = entry  # by the class's own method: some keep entries as attributes, too
    else:
        put_entry(value, key, entry)


def alike(one: Any, other: Any) -> bool:
    """Whether two nestings of objects, tuples and plain values are equal, objects by their types and entries."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, tree.Leaf) or not (is_object(one) or isinstance(one, tuple)):
        return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
    mine, theirs = entries(one), entries(other)
    return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)


def rebuilt(value: Any, function: Callable[[Any], Any], remedy: str) -> Any:
    """A copy of a tuple or object, with ``function`` of each of its entries, or of an array; other values as they are.

    Raises:
        StepError: It is a module, a function, or a set, a deque or an object with slots that holds tensors;
            ``remedy`` says what to do.
    """
    if isinstance(value, tuple):
        return tree.rebuild(value, [*map(function, value)])
    if isinstance(value, (list, dict)):
        filled = copy.copy(value)
        for key, each in entries(value).items():
            filled[key] = function(each)
        return filled
    is_followed = is_object(value)
    if isinstance(value, nn.Module) or is_function(value) or (not is_followed and holds_tensors(value)):
        raise StepError(f"The network leaves a {type(value).__name__} in what it is given. {remedy}", breaks=3)
    if not is_followed:
        return value.copy() if isinstance(value, np.ndarray) else value
    made = copy.copy(value)
    vars(made).update({key: function(each) for key, each in vars(value).items()})
    return made
