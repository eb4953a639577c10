"""Decides when gradients are reduced over the ranks, except in pipelined steps, which decide themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import nn

from lightning_shard.parallel.fsdp.input_gradients import InputGradients
from lightning_shard.parallel.fsdp.shard import (
    average_gradients,
    drop_unreduced_gradients,
    end_backward,
    no_gradient_sync,
    reduce_gradients,
    reshard,
    scalar_parameters,
)
from lightning_shard.plugin.optimizers.sharded import refuse_hooks_on_sums
from lightning_shard.plugin.steps.loop import Loop, has_whole_steps


class Gradients:
    """The gradients of one module on this rank.

    Args:
        module: Sharded, on its device.
        group: The ranks that hold the same part of the model.
        reduces_each: Every backward reduces them, not only the last one before an optimizer step.
        is_pipelined: Whether steps are pipelined.
    """

    def __init__(
        self, module: nn.Module, loop: Loop, group: dist.ProcessGroup, *, reduces_each: bool, is_pipelined: bool
    ) -> None:
        self._module = module
        self._loop = loop
        self._group = group
        self._reduces_each = reduces_each
        self._is_pipelined = is_pipelined
        self._scalars = scalar_parameters(module)
        self._is_held = False
        self._by_inputs = InputGradients(
            module, lambda: not self._is_held or self._reduces_each, frees=not has_whole_steps(module)
        )
        self._has_added_up = False
        self.is_accumulating = False
        """Whether another step follows the current one before the optimizer's."""

    def begin_step(self) -> None:
        """Prepare for a training step; drops what an interrupted accumulation left."""
        if self.is_accumulating and self._loop.begins_accumulation:
            drop_unreduced_gradients(self._module)
        self.is_accumulating = self._loop.is_accumulating
        adds_up = self.is_accumulating or (self._is_pipelined and self._reduces_each)
        if adds_up and not self._has_added_up:
            self._has_added_up = True
            reshard(self._module)  # a call before the step leaves parameters gathered, and those have our own hooks
            refuse_hooks_on_sums(self._module)

    def begin_backward(self) -> None:
        """Prepare for an automatic step's backward: Lightning's ``zero_grad`` came after backwards within the step."""
        if self._loop.begins_accumulation:
            drop_unreduced_gradients(self._module)
        self._by_inputs.begin()

    def end_backward(self) -> None:
        self._by_inputs.end()
        end_backward(self._module, reduces=not self._is_held)
        if not self._is_held:
            average_gradients((p for p in self._scalars if p.requires_grad), self._group)

    def synchronize(self) -> None:
        """Reduce the gradients that weren't reduced yet; a collective call over the group."""
        reduce_gradients(self._module)
        average_gradients(self._scalars, self._group)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, backwards don't reduce gradients, unless ``reduces_each`` is set."""
        units = nullcontext() if self._is_pipelined or self._reduces_each else no_gradient_sync(self._module)
        self._is_held = True
        try:
            with units:
                yield
        finally:
            self._is_held = False

    def of_inputs(self) -> AbstractContextManager[None]:
        """A context for a step that may take gradients with respect to its inputs."""
        return self._by_inputs.watched()
