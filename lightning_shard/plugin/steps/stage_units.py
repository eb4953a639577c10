"""What FSDP2's units of a rank's pipeline stages do over the microbatches of training steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.shard import (
    accumulate_late_gradients,
    end_backward,
    expect_backward_of,
    prefetching,
    reduce_gradients,
    reshard,
)
from lightning_shard.parallel.fsdp.units import leave_out_prefetching, sharded_units


class StageUnits:
    """The units of one module.

    Args:
        module: Cut and sharded.
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
            accumulating: Whether no optimizer step follows.
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
