"""Python's global generator, noted and put back as the bytes that it is.

``random.getstate`` and ``setstate`` make and read a tuple of 625 numbers: some thirty microseconds together, and
training notes where it stands for each call of a block. CPython keeps the Mersenne Twister in the object itself, behind
its head: the position, then the key (seen in 3.10 to 3.13). That this holds what ``getstate`` says is looked at once.

Private in Python: ``random._inst``.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

_WORDS = 624
_GENERATOR: Any = random._inst  # type: ignore[attr-defined]


class _Memory(ctypes.Structure):
    _fields_ = [("position", ctypes.c_int), ("key", ctypes.c_uint32 * _WORDS)]


def remember() -> Callable[[], None]:
    """Note where it stands; returns what puts it back there."""
    memory = _memory()
    if memory is None:
        return partial(random.setstate, random.getstate())
    before, waiting = bytes(memory), _GENERATOR.gauss_next

    def put_back() -> None:
        ctypes.memmove(ctypes.addressof(memory), before, len(before))
        _GENERATOR.gauss_next = waiting

    return put_back


def stands() -> Any:
    """Where it stands, to compare."""
    memory = _memory()
    return random.getstate() if memory is None else (bytes(memory), _GENERATOR.gauss_next)


@lru_cache(maxsize=1)
def _memory() -> _Memory | None:
    """``None`` where Python keeps it otherwise than we know."""
    head = object.__basicsize__
    if type(_GENERATOR) is not random.Random or random.Random.__basicsize__ < head + ctypes.sizeof(_Memory):
        return None
    memory = _Memory.from_address(id(_GENERATOR) + head)
    _, words, _ = random.getstate()
    return memory if (*memory.key, memory.position) == words else None
