"""Predicates for code that runs a block once more to check it: plain arguments, caches, and hooks that would fire."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""Types of values that no run changes, and that hold no part of a batch."""


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache of keys and values; each run appends to it."""
    return hasattr(value, "get_seq_length")


def has_other_hooks(module: nn.Module, packages: tuple[str, ...]) -> bool:
    """Whether a module has forward hooks or pre-hooks that none of ``packages`` defines.

    Args:
        packages: Prefixes of module names, each ending with a dot, such as ``"torch."``.
    """
    hooks: Iterable[Any] = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    functions = (hook.func if isinstance(hook, partial) else hook for hook in hooks)
    return not all(str(getattr(function, "__module__", "")).startswith(packages) for function in functions)
