"""Numpy's global generator, noted and put back as the bytes that it is.

``np.random.get_state`` and ``set_state`` make Python objects of 624 numbers: a tenth of a millisecond together, and
training notes where it stands for each call of a block. The Mersenne Twister's memory is had by numpy's ``ctypes``
interface; that it holds what ``get_state`` says is looked at once. A second Gaussian number that waits in the generator
isn't in this memory: where one may wait, the state is had by ``get_state``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lightning_shard.errors import StepError

_WORDS = 624


class _Memory(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint32 * _WORDS), ("position", ctypes.c_int)]


class _Known:
    #: The memory when it was last known that no second number waits. One takes drawing, which moves the position; or a
    #: ``set_state`` between two steps (a user's, or Lightning's around the sanity check) to where the last one began,
    #: but for that number, which is lost then.
    nothing_waits: bytes = b""


def seed(number: int) -> None:
    np.random.seed(number)
    memory = _memory()
    if memory is not None:
        _Known.nothing_waits = bytes(memory)


def remember() -> Callable[[], None]:
    """Note where it stands; returns what puts it back there."""
    memory = _memory()
    if memory is None:
        return _remember_all()
    before = bytes(memory)
    if before != _Known.nothing_waits:
        if np.random.get_state(legacy=False)["has_gauss"]:  # type: ignore[call-overload, index]
            return _remember_all()
        _Known.nothing_waits = before

    def put_back() -> None:
        now = _memory()
        if now is None:
            raise StepError("A step has put another kind of generator in the place of numpy's global one: put it back.")
        own: Any = np.random
        own.set_bit_generator(own.get_bit_generator())  # the one that is there: what waits is dropped
        ctypes.memmove(ctypes.addressof(now), before, len(before))
        _Known.nothing_waits = before

    return put_back


def stands() -> Any:
    """Where it stands, to compare."""
    memory = _memory()
    return repr(np.random.get_state()) if memory is None else bytes(memory)


def _remember_all() -> Callable[[], None]:
    return partial(set_state, np.random.get_state())


def set_state(state: Any) -> None:
    """As ``np.random.set_state``, by which a second number may wait where none did."""
    np.random.set_state(state)
    _Known.nothing_waits = b""


def _memory() -> _Memory | None:
    """``None`` for another generator than the Mersenne Twister, and where numpy keeps it otherwise than we know."""
    find: Any = getattr(np.random, "get_bit_generator", None)  # numpy 1.24
    return _memory_of(find()) if find is not None else None


@lru_cache(maxsize=1)
def _memory_of(generator: Any) -> _Memory | None:
    if type(generator) is not np.random.MT19937:
        return None
    memory = _Memory.from_address(generator.ctypes.state_address)
    state = generator.state["state"]
    is_it = memory.position == state["pos"] and bytes(memory.key) == state["key"].astype(np.uint32).tobytes()
    return memory if is_it else None
