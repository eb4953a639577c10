"""Refuses modules' backward hooks (``register_full_backward_hook``, ``…_pre_hook``) where they would act wrongly, and
backwards that reach another microbatch.

torch attaches them to a module's output after all of its forward hooks have run, and the value sent to another stage is
taken in a forward hook. So a backward hook would never run on the stage that runs the module; on the next stage, where
a stand-in replaces the module, it would receive ``None`` as the gradient of the module's input. A backward pre-hook
runs on each stage that uses the module's output, with a part of the gradient on each. So blocks, the modules that
contain blocks, and parts whose output crosses have neither.

Private in torch 2.13: a module's ``_backward_hooks`` and ``_backward_pre_hooks``, and those of all modules.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as of_all_modules

from lightning_shard.errors import WHOLE_BATCHES, StepError

HOOKS_OF_ALL = of_all_modules._global_backward_hooks, of_all_modules._global_backward_pre_hooks
"""The dicts into which torch registers hooks of all modules."""


def refuse_hooks(name: str, module: nn.Module) -> None:
    """
    Raises:
        StepError: The module has a backward hook or pre-hook, or all modules have.
    """
    if any((module._backward_hooks, module._backward_pre_hooks, *HOOKS_OF_ALL)):
        of_all = "" if module._backward_hooks or module._backward_pre_hooks else ", of all modules"
        raise StepError(
            f"{name} has a backward hook (register_full_backward_hook or …_pre_hook{of_all}), which with several"
            " pipeline stages would see a part of the gradient, or none: put the hook on a module inside of a block, or"
            " on the tensor (tensor.register_hook) where the network has computed it; or use pipeline_parallel_size=1.",
            breaks=4,
        )


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
