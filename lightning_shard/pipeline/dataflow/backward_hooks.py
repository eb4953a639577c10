"""Refuses modules' backward hooks (``register_full_backward_hook``, ``…_pre_hook``) where they would act wrongly, and
backwards that reach another microbatch.

Hooks of a single module and global hooks of all modules are checked. torch attaches them to a module's output after all
of its forward hooks have run, and the value sent to another stage is taken in a forward hook. So a backward hook would
never run on the stage that runs the module; on the next stage, where a stand-in replaces the module, it would receive
``None`` as the gradient of the module's input. A backward pre-hook runs on each stage that uses the module's output:
correctly if that is one stage, otherwise with a part of the gradient on each.

Private in torch 2.13: a module's ``_backward_hooks`` and ``_backward_pre_hooks``, and those of all modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from lightning_shard.errors import WHOLE_BATCHES, StepError

HOOKS_OF_ALL = (of_all_modules._global_backward_hooks, of_all_modules._global_backward_pre_hooks)
"""Global backward hooks of all modules, by id: the dicts into which torch registers them."""


def refuse_hooks(name: str, module: nn.Module) -> None:
    """Refuse backward hooks of a module whose output, or the output of a submodule, is sent or was received.

    Raises:
        StepError: It has a backward hook.
    """
    what = _found(module._backward_hooks, of_all_modules._global_backward_hooks)
    if what:
        raise StepError(
            f"{name} has a backward hook ({what.format('register_full_backward_hook', 'full_backward_hook')}), and its"
            " output is sent to another pipeline stage without passing that hook: put the hook on a module inside of"
            " it, or use pipeline_parallel_size=1.",
            breaks=4,
        )


def refuse_hooks_around(name: str, module: nn.Module, args: Any) -> None:
    """Refuse backward hooks of a module that contains blocks, called with ``args``: its blocks may span stages.

    If no argument requires gradients, the hook is called where the module's last block runs, as in one process.

    Raises:
        StepError: It has a backward hook.
    """
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in args):
        refuse_hooks(name, module)


def refuse_pre_hooks(name: str, module: nn.Module) -> None:
    """Refuse backward pre-hooks of a module whose output is used on several stages.

    Raises:
        StepError: It has a backward pre-hook.
    """
    what = _found(module._backward_pre_hooks, of_all_modules._global_backward_pre_hooks)
    if what:
        names = "register_full_backward_pre_hook", "full_backward_pre_hook"
        raise StepError(
            f"{name} has a backward pre-hook ({what.format(*names)}), and what it returns is used on several pipeline"
            " stages, so that the hook would see a part of the gradient on each: register a hook on the tensor"
            " (tensor.register_hook) where the network has computed it, or use pipeline_parallel_size=1.",
            breaks=4,
        )


def _found(own: Any, of_all: Any) -> str:
    if own:
        return "{0}"
    return "torch.nn.modules.module.register_module_{1}, of all modules" if of_all else ""


_OF_AN_EARLIER_ONE = "backward through the graph a second time"
"""torch's message (2.11 to 2.14)."""


def refuse_earlier_graph(error: RuntimeError) -> None:
    """Refuse a backward that has failed since it reached another microbatch's graph, by a value that the step has kept.

    Raises:
        StepError: It did.
    """
    if _OF_AN_EARLIER_ONE in str(error):
        raise StepError(
            "The result of a step depends on what the step before has left, with its graph. State that a step changes"
            " counts once per microbatch, and an earlier stage leaves the step after its"
            " last block: set it anew where the step begins, keep it without a graph (detach()), or use"
            f" {WHOLE_BATCHES} or pipeline_parallel_size=1.",
            breaks=6,
        ) from error
