"""Run a function inside a module's own ``__call__``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_shard.errors import StepError

_NOT_GATHERED = "mixed torch.Tensor and DTensor"
"""What torch (2.11 to 2.13) says where a plain tensor meets a parameter that is still sharded."""


def call_through(module: nn.Module, function: Callable[[], Any]) -> Any:
    """``function()`` between the module's forward hooks, which see it as the one argument.

    Steps are methods beside ``forward``, but the fully sharded root gathers its parameters in hooks around ``forward``.
    The step itself may call ``module(x)``: the real ``forward`` is back in place before it begins.

    Raises:
        StepError: It computes with parameters of a block that isn't called.
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
    except RuntimeError as error:
        if _NOT_GATHERED not in str(error):
            raise
        raise StepError(
            f"The step computes with parameters that are sharded ({error}). Each of the"
            " model's repeated blocks is gathered while it is called: call block(x) and not block.forward(x), and use"
            " its parameters inside of it only. Or use one process, or another strategy."
        ) from error
    finally:
        restore()
