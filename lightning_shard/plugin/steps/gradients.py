"""When gradients are reduced over the ranks: in plain steps, and over the microbatches of stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch import nn

from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits, InputGradients
from lightning_shard.parallel.fsdp.shard import (
    accumulate_late_gradients,
    average_gradients,
    drop_unreduced_gradients,
    end_backward,
    expect_backward_of,
    no_gradient_sync,
    prefetching,
    reduce_gradients,
    reshard,
    scalar_parameters,
)
from lightning_shard.parallel.fsdp.units import leave_out_prefetching, sharded_units
from lightning_shard.plugin.optimizers.sharded import refuse_hooks_on_sums
from lightning_shard.plugin.steps.loop import Loop, has_whole_steps


class Gradients:
    """The gradients of one module on this rank.

    Args:
        group: The ranks that hold the same part of the model.
        reduces_each: Every backward reduces them, not only the last one before an optimizer step.
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
        self.by_inputs = InputGradients(
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
        self.by_inputs.begin()

    def end_backward(self) -> None:
        self.by_inputs.end()
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


class StageUnits:
    """The units of one module.

    Args:
        bypassed: Gathers units that backwards bypass, where units are freed after their forwards.
        splits: Whether backwards are split in two parts.
        reduces_each: Whether each backward reduces gradients over the data ranks.
        reshards_each: Whether each forward and backward frees what it has gathered.
    """

    def __init__(
        self,
        module: nn.Module,
        bypassed: BypassedUnits | None,
        *,
        splits: bool,
        reduces_each: bool,
        reshards_each: bool,
    ) -> None:
        self._module = module
        self.bypassed = bypassed
        self._splits = splits
        self._reduces_each = reduces_each
        self._reshards_each = reshards_each
        self._units: list[nn.Module] = []
        self._has_trained = False

    def begin_step(self, epoch: int) -> bool:
        """A training step begins; returns whether there are any units, whose backwards are expected."""
        self._units = [*sharded_units(self._module)]
        if self.bypassed is not None:
            self.bypassed.begin_step(epoch)
        return bool(self._units)

    def prefetching(self) -> AbstractContextManager[None]:
        """Context of a step's forwards and backwards; gathering overlaps with the transfer of the stage's input."""
        if not self._has_trained:  # FSDP2 initialises itself in the first one
            self._has_trained = True
            return nullcontext()
        return prefetching(self._module, all_units=not self._reshards_each)

    def expect_backward(self, *, is_last: bool, accumulating: bool) -> None:
        """A backward, or its first part, begins.

        Args:
            is_last: Whether it is the step's last on this rank.
        """
        if not self._reshards_each:
            leave_out_prefetching(self._units)
        if self._splits:  # FSDP2 takes the end of a backward's first part for the end of the whole backward
            expect_backward_of(self._units, reduces=False, reshards=False, is_last=is_last)
            return
        reduces = self._reduces_each or (is_last and not accumulating)
        expect_backward_of(self._units, reduces=reduces, reshards=is_last or self._reshards_each)

    def end_split_backward(self) -> None:
        """The second part of a backward has run."""
        if self._reduces_each:
            reduce_gradients(self._module, reshards=False)
        else:
            accumulate_late_gradients(self._units)

    def end_backwards(self, *, accumulating: bool, has_skipped: bool) -> None:
        """Do what the end of a last backward would have done, where there was none.

        Args:
            has_skipped: Whether a backward was left out, since later stages had no gradient for it.
        """
        end_backward(self._module, reduces=not accumulating)
        if self._splits or (has_skipped and not accumulating):
            if not accumulating:
                reduce_gradients(self._module)
            reshard(self._module)
