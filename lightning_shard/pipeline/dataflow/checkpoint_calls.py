"""Knows which calls of ``torch.utils.checkpoint`` enclose the code that runs: a backward reruns what they call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning_shard.torch_private import checkpoint_calls_within


class _Calls(threading.local):
    functions: tuple[Any, ...] = ()


_calls = _Calls()


@contextmanager
def seen() -> Iterator[None]:
    """Context in which checkpoints are known."""
    left()
    with checkpoint_calls_within(_calling):
        yield


def left() -> None:
    """Forget those that were left with the code that called them, by an error: in torch before 2.13 they end later."""
    _calls.functions = ()


@contextmanager
def _calling(function: Any) -> Iterator[None]:
    before = _calls.functions
    _calls.functions = *before, function
    try:
        yield
    finally:
        _calls.functions = before


def checkpointed() -> tuple[Any, ...]:
    """What the enclosing checkpoints call, outermost first; for a method, the object it is bound to (a module)."""
    return tuple(map(_bound_to, _calls.functions))


def _bound_to(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", function)
