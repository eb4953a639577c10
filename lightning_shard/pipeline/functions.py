"""A model's own autograd functions, met as a whole.

torch's function modes see the operations inside of ``Function.forward``, where gradients are off, and not the function
itself. So while a thread traces, ``torch.autograd.Function.apply`` is one that tells of the whole call (torch 2.11 to
2.13).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from torch.autograd import Function


class Watcher(Protocol):
    def begins(self, args: Any) -> None: ...

    def ends(self, name: str, result: Any) -> Any: ...


_apply: Any = Function.__dict__["apply"]
_of_thread = threading.local()
_lock = threading.Lock()
_told_now: list[Watcher] = []


@contextmanager
def told_to(watcher: Watcher) -> Iterator[None]:
    """Inside, on this thread, each call of an autograd function is told to ``watcher``, which may change its result."""
    with _lock:
        _told_now.append(watcher)
        Function.apply = classmethod(_told)  # type: ignore[method-assign, assignment]
    _of_thread.watcher = watcher
    try:
        yield
    finally:
        _of_thread.watcher = None
        with _lock:
            _told_now.remove(watcher)
            if not _told_now:
                Function.apply = _apply  # type: ignore[method-assign]


def is_inside() -> bool:
    """Whether the caller runs within an autograd function, however it was called: what it computes has no gradient."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _apply.__func__.__code__:
            return True
        frame = frame.f_back
    return False


def _told(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call = _apply.__get__(None, cls)
    watcher: Watcher | None = getattr(_of_thread, "watcher", None)
    if watcher is None:
        return call(*args, **kwargs)
    watcher.begins((args, kwargs))
    return watcher.ends(cls.__name__, call(*args, **kwargs))
