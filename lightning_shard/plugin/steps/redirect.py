"""Run a function inside a module's own ``__call__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def call_through(module: nn.Module, function: Callable[[], Any]) -> Any:
    """``function()`` between the module's forward hooks, which see it as the one argument.

    Steps are methods beside ``forward``, but the fully sharded root gathers its parameters in hooks around ``forward``.
    The step itself may call ``module(x)``: the real ``forward`` is back in place before it begins.
    """
    own = module.__dict__.get("forward")

    def restore() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own

    def forward(function: Callable[[], Any]) -> Any:
        restore()
        return function()

    module.__dict__["forward"] = forward
    try:
        # FSDP2 moves the arguments to a CUDA device, and in torch 2.11 fails where there are none
        return module(function)
    finally:
        restore()
