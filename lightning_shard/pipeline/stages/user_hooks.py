"""The forward hooks of a module that users registered, told from those of this library and of sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A user's forward hooks of a module by number.

    A part around the blocks may be inside of blocks too, such as a shared rotary embedding: it has hooks of stages.
    """
    return {
        number: hook
        for number, hook in module._forward_hooks.items()
        if not f"{_defined_in(hook)}.".startswith(("torch.distributed.", "lightning_shard."))
    }


def _defined_in(hook: Any) -> str:
    return str(getattr(getattr(hook, "func", hook), "__module__", ""))
