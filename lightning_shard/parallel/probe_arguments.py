"""What blocks are given: values that hold nothing, and users' hooks that would see a run more."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""Values that no run changes, and that hold nothing of a batch."""


def is_cache(value: Any) -> bool:
    """Whether it is one of transformers' caches of keys and values, to which each run adds."""
    return hasattr(value, "get_seq_length")


def has_other_hooks(module: nn.Module, packages: tuple[str, ...]) -> bool:
    """Whether a module has forward hooks or pre-hooks of other packages than these, which end with a dot."""
    hooks: Iterable[Any] = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    functions = (hook.func if isinstance(hook, partial) else hook for hook in hooks)
    return not all(str(getattr(function, "__module__", "")).startswith(packages) for function in functions)
