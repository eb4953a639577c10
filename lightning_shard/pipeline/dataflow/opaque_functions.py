"""Traces opaque functions as one operation each: autograd functions, ``torch.func`` transforms, scripted functions.

torch's function modes see the operations inside ``Function.forward``, where gradients are disabled, and not the
function itself. Inside a transform, such as ``vmap``, or a scripted function, tensors lose their class, and so their
mark as unknown. So while a thread traces, such calls are patched to report to its watcher (``trace.py``) as one
operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.autograd import Function

from lightning_shard.pipeline.dataflow.taint import Unknown, collecting_unknown
from lightning_shard.torch_private import TRANSFORMS, replaced


class Watcher(Protocol):
    def begins(self, args: Any) -> None: ...

    def ends(self, name: str, result: Any, *, unknown: list[Unknown]) -> Any: ...


_apply: Any = Function.__dict__["apply"]
_of_thread = threading.local()


def _reporting_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call = _apply.__get__(None, cls)
    watcher: Watcher | None = getattr(_of_thread, "watcher", None)
    if watcher is None:
        return call(*args, **kwargs)
    watcher.begins((args, kwargs))
    return watcher.ends(cls.__name__, call(*args, **kwargs), unknown=[])


def _reporting(call: Callable[..., Any]) -> Callable[..., Any]:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        watcher: Watcher | None = getattr(_of_thread, "watcher", None)
        if watcher is None:
            return call(*args, **kwargs)
        watcher.begins((args, kwargs))
        with collecting_unknown((args, kwargs)) as unknown:  # they may also come from a closure
            result = call(*args, **kwargs)
        return watcher.ends(call.__name__, result, unknown=unknown)

    return reporting


_PATCHED: list[tuple[Any, str, Any]] = [
    (Function, "apply", classmethod(_reporting_apply)),
    *(
        (holder, name, _reporting(getattr(holder, name)))
        for holder, name in [*TRANSFORMS, (torch.jit.ScriptFunction, "__call__")]
    ),
]
"""Each patched function: its holder, its name, and the replacement that reports to the watcher."""


@contextmanager
def reported_to(watcher: Watcher) -> Iterator[None]:
    """Context in which each such call on this thread is reported to ``watcher``, which may replace its result."""
    _of_thread.watcher = watcher
    try:
        with replaced(*_PATCHED):
            yield
    finally:
        _of_thread.watcher = None
