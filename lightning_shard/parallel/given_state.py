"""The state of objects that a block is given, so that a second run of the block finds what the first one found."""

from __future__ import annotations

import argparse
import types
from collections import UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.namespaces import is_machinery

_DEPTH = 5
_OF_USERS = (types.SimpleNamespace, argparse.Namespace, UserDict, UserList, deque)
"""Classes of the standard library whose objects hold a user's values."""


class GivenState:
    """The entries of lists and dicts, and the attributes of objects, in arguments and in one another.

    Tensors are held as they are: a change of their elements isn't seen.
    """

    def __init__(self, arguments: Any) -> None:
        self._before = [(each, _entries(each)) for each in _objects(arguments, _DEPTH, set())]

    def forget_unchanged(self) -> None:
        """A run has ended: hold only what it has changed."""
        self._before = [(each, entries) for each, entries in self._before if _differ(entries, _entries(each))]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the objects are as they were before the first run; afterwards, as they are now."""
        now = [(each, _entries(each)) for each, _ in self._before]
        try:
            for each, entries in self._before:
                _put(each, entries)
            yield
        finally:
            for each, entries in now:
                _put(each, entries)


def _objects(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if not depth or id(value) in seen or isinstance(value, (Tensor, nn.Module, type, str, bytes, int, float)):
        return
    if isinstance(value, tuple):
        held = list(value)
    elif isinstance(value, (list, dict, deque)) or _is_of_user(value):
        seen.add(id(value))
        yield value
        held = [*_entries(value).values()]
    else:
        return
    for each in held:
        yield from _objects(each, depth - 1, seen)


def _is_of_user(value: Any) -> bool:
    kind = type(value)
    if not hasattr(value, "__dict__") and not _slots(value):
        return False
    return isinstance(value, _OF_USERS) or not (is_machinery(kind) or callable(value))


def _slots(value: Any) -> list[str]:
    names = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    listed = (name for of_kind in names for name in ([of_kind] if isinstance(of_kind, str) else of_kind))
    return [name for name in listed if not name.startswith("__")]


def _entries(value: Any) -> dict[Any, Any]:
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, deque)):
        return dict(enumerate(value))
    held = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def _differ(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return [*one] != [*other] or not tree.same_entries([*one.values()], [*other.values()])


def _put(value: Any, entries: dict[Any, Any]) -> None:
    if isinstance(value, dict):
        value.clear()
        value.update(entries)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(entries.values())
    else:
        for name in _entries(value).keys() - entries.keys():
            object.__delattr__(value, name)
        for name, entry in entries.items():
            object.__setattr__(value, name, entry)
