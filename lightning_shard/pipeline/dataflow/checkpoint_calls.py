"""Which calls of ``torch.utils.checkpoint`` run: what is called in them is called again by a backward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

from torch.utils.checkpoint import checkpoint

_CHECKPOINT = inspect.unwrap(checkpoint).__code__


def checkpoints() -> Iterator[FrameType]:
    """The calls of ``torch.utils.checkpoint`` that the caller runs in."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            yield frame
        frame = frame.f_back


def function_of(call: FrameType) -> Any:
    """What a checkpoint calls; of a module's method the module."""
    function = call.f_locals["function"]
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", function)
