"""Hooks of a module that users registered, told from those of this library and of torch's sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_OF_PLANS = "lightning_shard.parallel.tensor.", "torch.distributed.tensor."
_OF_SHARDING = "lightning_shard.", "torch.distributed."
_OF_FSDP = "lightning_shard.parallel.fsdp.arguments.", "torch.distributed."


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """A user's forward hooks of a module by number.

    A part around the blocks may be inside of blocks too, such as a shared rotary embedding: it has hooks of stages.
    """
    return {number: hook for number, hook in module._forward_hooks.items() if not _is_of(hook, _OF_SHARDING)}


def has_hooks_beside_plans(module: nn.Module) -> bool:
    """Whether a module has hooks other than those by which a tensor parallel plan splits it."""
    backward_hooks = module._backward_pre_hooks or module._backward_hooks
    return bool(backward_hooks) or has_forward_hooks_beside(module, _OF_PLANS)


def has_forward_hooks_beside(module: nn.Module, packages: tuple[str, ...]) -> bool:
    """Whether a module has forward hooks or pre-hooks that no module in ``packages``, such as ``"torch."``, defines."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return not all(_is_of(hook, packages) for hook in hooks)


def is_of_fsdp(hook: Any) -> bool:
    """Whether a hook of a module or tensor is FSDP2's, or one in its place."""
    return _is_of(hook, _OF_FSDP)


def _is_of(hook: Any, packages: tuple[str, ...]) -> bool:
    defined_in = getattr(getattr(hook, "func", hook), "__module__", "")
    return f"{defined_in}.".startswith(packages)
