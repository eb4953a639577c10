"""Tells whether an attribute was replaced or has changed inside: by identity, versions, digests and lengths.

No copies are made. Arrays have no versions, so what they hold is read: a digest of a million numbers takes a
millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_shard.plugin.steps.state.python_state import CONTAINERS, attributes, entries, is_object
from lightning_shard.versions import version

_ENTRIES = 1024
"""How many entries of a container are checked for replacement; beyond these, only its length is."""
_LOOKED_INTO = 64
"""How many of them are looked into."""


def attributes_and_buffers(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def change_mark(value: Any) -> int:
    """A tensor's version, an array's digest or a container's length, which a change in place changes."""
    return len(value) if isinstance(value, CONTAINERS) else version(value)


def identities(value: Any, depth: int) -> Iterator[Any]:
    """Values that show a replacement or change: objects by identity; versions, digests and lengths as integers."""
    yield value
    if isinstance(value, (Tensor, np.ndarray)):
        yield version(value)
        return
    inner: list[Any] = []
    if isinstance(value, (*CONTAINERS, tuple)):
        yield len(value)
        inner = entries(value, _ENTRIES)
    elif is_object(value):
        inner = [*attributes(value).values()]
    for place, each in enumerate(inner):
        yield each
        if (
            depth
            and place < _LOOKED_INTO
            and (isinstance(each, (Tensor, np.ndarray, *CONTAINERS, tuple)) or is_object(each))
        ):
            yield from identities(each, depth - 1)


def simple_fields(before: dict[str, Any] | None, inside: list[Any] | None, value: Any) -> set[str]:
    """The names of an object's attributes that were set to simple values, if nothing else in the object has changed."""
    if before is None or inside is None or before.keys() != attributes(value).keys():
        return set()
    now, held_now = attributes(value), [*identities(value, 2)]
    fields = {name for name, held in before.items() if held is not now[name]}
    if len(inside) != len(held_now) or any(not is_simple(now[name]) for name in fields):
        return set()
    return fields if sum(differ([a], [b]) for a, b in zip(inside, held_now)) == len(fields) else set()


def differ(before: list[Any] | None, now: list[Any]) -> bool:
    """Whether two lists of :func:`identities` differ."""
    if before is None or len(before) != len(now):
        return True
    return any(a is not b and not (type(a) is type(b) is int and a == b) for a, b in zip(before, now))


def is_simple(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, complex, str, bytes)
