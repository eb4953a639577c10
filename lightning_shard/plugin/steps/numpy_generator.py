"""Snapshots and restores numpy's global generator by its memory, as bytes.

``np.random.get_state`` and ``set_state`` build Python objects of 624 numbers, which takes a tenth of a millisecond
together, and training takes a snapshot for each call of a block. The memory of the Mersenne Twister is accessible
through numpy's ``ctypes`` interface; its contents are checked against ``get_state`` once. The memory doesn't include
the second Gaussian number that a draw may leave cached. Where one may be cached, ``get_state`` is used.
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
    #: The memory at the last time when no second Gaussian number was known to be cached. Only a draw caches one, and
    #: moves the position; or a ``set_state`` between two steps (a user's, or Lightning's around the sanity check) that
    #: restores the position at which the last step began together with a cached number. That number is then lost.
    nothing_waits: bytes = b""


def seed(number: int) -> None:
    np.random.seed(number)
    memory = _memory()
    if memory is not None:
        _Known.nothing_waits = bytes(memory)


def remember() -> Callable[[], None]:
    """Snapshot the state; returns a function that restores it."""
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
            raise StepError(
                "A step has replaced numpy's global bit generator by another kind (np.random.set_bit_generator):"
                " restore it by the end of the step."
            )
        own: Any = np.random
        own.set_bit_generator(own.get_bit_generator())  # sets the same one, which drops a cached Gaussian number
        ctypes.memmove(ctypes.addressof(now), before, len(before))
        _Known.nothing_waits = before

    return put_back


def stands() -> Any:
    """The state, for comparison."""
    memory = _memory()
    return repr(np.random.get_state()) if memory is None else bytes(memory)


def _remember_all() -> Callable[[], None]:
    return partial(set_state, np.random.get_state())


def set_state(state: Any) -> None:
    """As ``np.random.set_state``, after which a second Gaussian number may be cached where none was."""
    np.random.set_state(state)
    _Known.nothing_waits = b""


def _memory() -> _Memory | None:
    """``None`` if the generator isn't a Mersenne Twister, or if numpy lays its memory out differently."""
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
