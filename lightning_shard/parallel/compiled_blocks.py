"""Blocks through ``torch.compile``, in place; and what a user has compiled.

Private (torch 2.11 to 2.13): where ``compile()`` of a module leaves its call, and the class of what ``torch.compile``
makes of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError


def check_backend(setting: Any) -> None:
    """Check ``compile_blocks``: ``False``, ``True``, or the name of a backend of ``torch.compile``.

    Raises:
        ConfigurationError: It is none of these.
    """
    if isinstance(setting, bool):
        return
    known = torch.compiler.list_backends(())  # type: ignore[no-untyped-call]
    if setting not in known:
        raise ConfigurationError(
            f"compile_blocks={setting!r} isn't known: use True, or a backend of torch.compile ({', '.join(known)})."
        )


def calls_compiled(module: nn.Module) -> bool:
    """Whether a call goes through the compiler with its hooks, as after ``module.compile()``."""
    return module._compiled_call_impl is not None


def is_wrapped(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile`` has made of a module."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def compile_block(block: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile a block's forward, in place, by a backend of ``torch.compile``; blocks alike share what was compiled.

    The forward alone, and not the call (as ``block.compile()`` does): the hooks around it gather parameters and talk to
    other stages.
    """
    block.__dict__["forward"] = torch.compile(block.forward, backend=backend)
