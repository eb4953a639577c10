"""Compile forwards with ``torch.compile``, in place: those of blocks, and of modules that a user has compiled.

``module.compile()`` and ``torch.compile(module)`` compile a module's call, with its hooks and those of modules in it.
Here hooks all-gather parameters and communicate with other stages, and can't be compiled. So such modules are found
before they are laid out, and their forwards alone are compiled. A module that holds blocks has these compiled instead.

Private (torch 2.11 to 2.14): ``Module._compiled_call_impl``, which ``module.compile()`` sets, with the compiler in its
closure; ``torch._dynamo.OptimizedModule``, the class that ``torch.compile(module)`` returns, and its ``dynamo_ctx``;
and ``_torchdynamo_orig_callable``, which ``torch.compile`` sets on functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.containers import with_forward

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Compiles a function, with the backend and the options that a user has chosen."""


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


def take_out(root: nn.Module) -> dict[str, Compiler]:
    """Have what a user has compiled below ``root`` run as it is; returns the compilers by the modules' names."""
    compilers: dict[str, Compiler] = {}
    for name, module in root.named_modules():
        if _is_wrapped(module):
            held: Any = module
            compilers[f"{name}._orig_mod".lstrip(".")] = held.dynamo_ctx
            module.__dict__["forward"] = held._orig_mod.__call__
        elif module._compiled_call_impl is not None:
            compiler = _compiler_of(module._compiled_call_impl)
            module._compiled_call_impl = None
            if compiler is not None:
                compilers[name] = compiler
    return compilers


def compile_forwards(
    root: nn.Module,
    compilers: Mapping[str, Compiler],
    blocks: Collection[str],
    *,
    within: Collection[str] | None,
) -> None:
    """Compile what :func:`take_out` has found, without hooks. Where a module holds blocks, these are compiled.

    Args:
        blocks: The names of all blocks, on which hooks will be.
        within: The blocks of this rank's stages, outside of which forwards run as they are; ``None`` without stages.
            Stages replace attributes of the modules around blocks, which the compiler doesn't take.
    """
    for name, compiler in compilers.items():
        for each in [block for block in blocks if not name or block.startswith(f"{name}.")] or [name]:
            if within is not None and not any(f"{each}.".startswith(f"{block}.") for block in within):
                continue
            for called in with_forward(root.get_submodule(each)):
                own = called.__dict__.get("forward")
                if not (_is_wrapped(called) or hasattr(own, "_torchdynamo_orig_callable")):
                    called.__dict__["forward"] = compiler(called.forward)


def _compiler_of(compiled: Any) -> Compiler | None:
    """What ``torch.compile`` has made a compiled function with; ``None`` for ``disable=True``."""
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    return next((each for each in cells if isinstance(each, torch._dynamo.eval_frame.OptimizeContext)), None)


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a module is the wrapper that ``torch.compile(module)`` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def compile_block(block: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile a block's forward with a ``torch.compile`` backend, in place; blocks of one class share compiled code.

    Only the forward is compiled, not the call with its hooks (as ``block.compile()`` does): the hooks all-gather
    parameters and communicate with other stages.
    """
    block.__dict__["forward"] = torch.compile(block.forward, backend=backend)
