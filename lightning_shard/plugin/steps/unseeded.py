"""Seeds the generators that a step makes without a seed, which would draw from the operating system.

``np.random.default_rng()`` or ``random.Random()`` in a step would give each stage and tensor rank other numbers. Inside
of :func:`seeded` they take their seeds, one after the other, from that of the microbatch or block.

Private: ``numpy.random.bit_generator.randbits`` (seen in numpy 2.4), which a ``SeedSequence`` without entropy calls: so
all bit generators, ``RandomState()`` and ``np.random.seed()``. Where numpy has no such name it is left alone. Public,
but replaced: ``random.Random.seed`` and ``random.seed``. Other threads draw as ever, since it isn't the same on all
ranks when they do; so do processes that a step forks, such as the workers of a loader, which would all draw the same.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from numpy.random import bit_generator

_BITS = 128
_seed_python: Any = random.Random.seed
seed_python: Any = random.seed
"""Python's own, which seeds the global generator."""


class _State(threading.local):
    """Of each thread.

    Attributes:
        is_active: Whether it is inside of :func:`seeded`.
        next: From which seed the next ones are derived, and how many were; ``None`` as long as there is none.
    """

    is_active = False
    next: tuple[int, int] | None = None


STATE = _State()


def _forget() -> None:
    STATE.next = None


os.register_at_fork(after_in_child=_forget)


@contextmanager
def seeded() -> Iterator[None]:
    """Context in which generators without a seed of their own get derived ones, once ``STATE.next`` is set."""
    if STATE.is_active:
        yield
        return
    python: Any = random
    numpy: Any = bit_generator
    seed_global = python.seed
    of_system: Any = getattr(numpy, "randbits", None)

    def bits(count: int) -> int:
        return of_system(count) if STATE.next is None else _next(count)

    def seed_one(generator: random.Random, a: Any = None, version: int = 2) -> None:
        _seed_python(generator, _next(_BITS) if a is None and STATE.next is not None else a, version)

    STATE.is_active = True
    python.Random.seed = seed_one
    python.seed = MethodType(seed_one, seed_global.__self__)
    if of_system is not None:
        numpy.randbits = bits
    try:
        yield
    finally:
        STATE.is_active, STATE.next = False, None
        python.Random.seed, python.seed = _seed_python, seed_global
        if of_system is not None:
            numpy.randbits = of_system


def _next(bits: int) -> int:
    """The next seed, of so many bits."""
    assert STATE.next is not None
    seed, taken = STATE.next
    STATE.next = seed, taken + 1
    text = f"{seed}/made/{taken}"
    size = -(-bits // 8)
    return int.from_bytes(hashlib.shake_128(text.encode()).digest(size), "big") >> (8 * size - bits)
