"""Replays iterators that a module keeps, such as one over a second loader: a repeated run draws the same entries."""

from __future__ import annotations

import functools
import io
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from lightning_shard.namespaces import Namespace
from lightning_shard.plugin.steps.state.python_state import children, is_object


class Replayed(Iterator[Any]):
    """Replaces an iterator that may have to be rewound to where it stood."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._drawn: list[Any] = []
        self.place = 0

    def __next__(self) -> Any:
        if self.place == len(self._drawn):
            self._drawn.append(next(self._iterator))
        self.place += 1
        return self._drawn[self.place - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    @property
    def has_drawn(self) -> bool:
        return bool(self._drawn)

    def rest(self) -> Iterator[Any]:
        """The iterator to continue with: the original, preceded by entries that were drawn but not used."""
        return chain(self._drawn[self.place :], self._iterator) if self.place < len(self._drawn) else self._iterator


class ReplayedIterators:
    """Replaces all iterators that objects, lists, dicts, globals and closures hold.

    Args:
        holders: The objects, lists, dicts, namespaces and closures' cells.
    """

    def __init__(self, holders: Iterable[Any]) -> None:
        replayed: dict[int, Replayed] = {}
        self._begin: dict[Replayed, int] = {}  # where each is rewound to; includes those replaced by another instance
        self._places: list[tuple[Any, Any, Replayed]] = []
        for holder in holders:
            entries = _entries(holder)
            for key, value in [*dict.items(entries)] if isinstance(entries, dict) else enumerate(entries):
                kind: Any = type(value)
                if not _is_iterator(kind):
                    continue
                if isinstance(value, Replayed):
                    self._begin[value] = value.place
                else:
                    found = replayed.setdefault(id(value), Replayed(value))
                    if _put(holder, key, found):
                        self._places.append((holder, key, found))
        self._begin |= dict.fromkeys(replayed.values(), 0)

    def begin_again(self) -> None:
        for replayed, place in self._begin.items():
            replayed.place = place

    def drawn_from(self) -> bool:
        return any(replayed.has_drawn for _, _, replayed in self._places)

    def end(self) -> None:
        """Restore the original iterators to their places, where code hasn't replaced them."""
        rests: dict[int, Iterator[Any]] = {}
        for holder, key, replayed in self._places:
            entries = _entries(holder)
            is_there = key in entries if isinstance(entries, dict) else key < len(entries)
            if is_there and entries[key] is replayed:
                _put(holder, key, rests.setdefault(id(replayed), replayed.rest()))


@functools.cache
def _is_iterator(kind: Any) -> bool:
    return issubclass(kind, Iterator) and not issubclass(kind, (nn.Module, io.IOBase))


def _entries(holder: Any) -> Any:
    """The dict or sequence in which an object holds its values; of namespaces and cells one that is made for it."""
    if isinstance(holder, (list, deque, dict)):
        return holder
    if isinstance(holder, Namespace):
        return holder.held
    if isinstance(holder, types.CellType):
        return dict(children(holder))  # empty if it isn't assigned yet
    return getattr(holder, "__dict__", ()) if isinstance(holder, nn.Module) or is_object(holder) else ()


def _put(holder: Any, key: Any, value: Any) -> bool:
    """Replace a value that an object holds; ``False`` for a default of a function's parameter, which can't be."""
    if isinstance(holder, Namespace):
        if not isinstance(holder.holder, dict) and key not in vars(holder.holder):
            return False
        holder.put(key, value)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    else:
        _entries(holder)[key] = value
    return True
