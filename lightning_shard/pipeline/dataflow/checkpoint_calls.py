"""Finds the enclosing calls of ``torch.utils.checkpoint`` on the Python stack: a backward reruns what they call.

Reads the parameter ``function`` from the frame of ``checkpoint`` (torch 2.13).
"""

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
    """The frames of ``torch.utils.checkpoint`` that enclose the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            yield frame
        frame = frame.f_back


def function_of(call: FrameType) -> Any:
    """The function that a checkpoint calls; for a method, the object it is bound to (a module)."""
    function = call.f_locals["function"]
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__self__", function)
