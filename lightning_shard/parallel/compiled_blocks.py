"""Compile blocks with ``torch.compile``, in place, and recognise modules that a user has compiled.

Private (torch 2.11 to 2.13): ``Module._compiled_call_impl``, which ``module.compile()`` sets, and
``torch._dynamo.OptimizedModule``, the class that ``torch.compile(module)`` returns; and ``_torchdynamo_orig_callable``,
which ``torch.compile`` sets on functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError


def check_backend(setting: Any) -> None:
    """Check the setting ``compile_blocks``: ``False``, ``True``, or the name of a ``torch.compile`` backend.

    Raises:
        ConfigurationError: The setting has another value.
    """
    if isinstance(setting, bool):
        return
    known = torch.compiler.list_backends(())  # type: ignore[no-untyped-call]
    if not isinstance(setting, str) or setting not in known:
        raise ConfigurationError(
            f"compile_blocks={setting!r} isn't known: use True, or a backend of torch.compile ({', '.join(known)})."
        )


def calls_compiled(module: nn.Module) -> bool:
    """Whether calls of a module are compiled together with its hooks, as after ``module.compile()``."""
    return module._compiled_call_impl is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward, or its calls, are compiled: hooks on modules in it would be too."""
    forward = module.__dict__.get("forward")
    return calls_compiled(module) or is_wrapped(module) or hasattr(forward, "_torchdynamo_orig_callable")


def is_wrapped(module: nn.Module) -> bool:
    """Whether a module is the wrapper that ``torch.compile(module)`` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def compile_block(block: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile a block's forward with a ``torch.compile`` backend, in place; blocks of one class share compiled code.

    Only the forward is compiled, not the call with its hooks (as ``block.compile()`` does): the hooks all-gather
    parameters and communicate with other stages.
    """
    block.__dict__["forward"] = torch.compile(block.forward, backend=backend)
