"""Hooks that modules have for their backward (``register_full_backward_hook``, ``…_pre_hook``), of all modules too.

torch has them see what leaves a module after all of its forward hooks, and what is sent to another stage was taken by
one of these. So a backward hook would never act on the stage that runs a module, and on the next one, where the module
is stood in for, it would be given ``None`` in place of the gradient of what goes in. A pre-hook acts wherever the
module's output is used: once if that is on one stage, and else on a part of the gradient on each.

Private in torch 2.13: a module's ``_backward_hooks`` and ``_backward_pre_hooks``, and those of all modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from lightning_shard.errors import StepError


def has_hooks(module: nn.Module) -> bool:
    """Whether there is anything to refuse of it; asked of each block in each step."""
    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or of_all_modules._global_backward_hooks
        or of_all_modules._global_backward_pre_hooks
    )


def refuse_hooks(name: str, module: nn.Module) -> None:
    """What this module returns, or what is in it, is sent to another stage, or was received.

    Raises:
        StepError: It has a backward hook.
    """
    what = _found(module._backward_hooks, of_all_modules._global_backward_hooks)
    if what:
        raise StepError(
            f"{name} has a backward hook ({what.format('register_full_backward_hook', 'full_backward_hook')}), and what"
            " it hands on to another pipeline stage would pass it by: put the hook on a module inside of it, or use"
            " pipeline_parallel_size=1."
        )


def refuse_hooks_around(name: str, module: nn.Module, args: Any) -> None:
    """A module around blocks is called with this; it may go on on another stage.

    One that is given nothing with gradients has its hook called where its last block runs, as in one process.

    Raises:
        StepError: It has a backward hook.
    """
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args):
        refuse_hooks(name, module)


def refuse_pre_hooks(name: str, module: nn.Module) -> None:
    """What this module returns is used on several stages.

    Raises:
        StepError: It has a backward pre-hook.
    """
    what = _found(module._backward_pre_hooks, of_all_modules._global_backward_pre_hooks)
    if what:
        names = "register_full_backward_pre_hook", "full_backward_pre_hook"
        raise StepError(
            f"{name} has a backward pre-hook ({what.format(*names)}), and what it returns is used on several pipeline"
            " stages, so that the hook would see a part of the gradient on each: register a hook on the tensor"
            " (tensor.register_hook) where the network has computed it, or use pipeline_parallel_size=1."
        )


def _found(own: Any, of_all: Any) -> str:
    if own:
        return "{0}"
    return "torch.nn.modules.module.register_module_{1}, of all modules" if of_all else ""
