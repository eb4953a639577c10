"""Runs the checks of the first step of each kind in a run, and of the first optimizer updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.layout import TENSOR_AXIS
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.optimizers.sharded import refuse_parameter_hooks
from lightning_shard.plugin.steps.batches import OwnCalls
from lightning_shard.plugin.steps.checks import tensor_ranks
from lightning_shard.plugin.steps.checks.agreement import check_same_batch
from lightning_shard.plugin.steps.checks.buffers import ChangedBuffers, CopiesOfStages, unchanged
from lightning_shard.plugin.steps.checks.tensor_ranks import Shown, TensorRanks
from lightning_shard.plugin.steps.loop import Loop

_STEPS = 3
"""Number of training steps in which copies on stages are compared; they also are at every save."""

_UPDATES = 2
"""Number of optimizer steps after which buffers are compared over data ranks."""


class FirstStepChecks:
    """The checks of one module's steps in one run. To make them is a collective call over the pipeline.

    It has many attributes: the checks, and the ranks that each of them is among.

    Args:
        check_saved: Refuses what could not be saved; a collective call over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        loop: Loop,
        known: Assembly,
        mesh: DeviceMesh,
        groups: Groups,
        device: torch.device,
        own_calls: OwnCalls,
        check_saved: Callable[[], None],
    ) -> None:
        self._module = module
        self._loop = loop
        self._layout = layout = known.layout
        self._mesh = mesh
        self._data = groups.data
        self._check_saved = check_saved
        self._own_calls = own_calls
        stages = known.stages
        self._of_blocks = of_blocks = stages.shared_buffers if stages is not None else ()
        self._copies: CopiesOfStages | None = None
        if stages is not None:
            self._copies = CopiesOfStages(module, of_blocks, groups, device, loop.whole_parameters)
        # the ranks that share sequences, if not each has sequences of its own
        self._context = groups.context if layout.context_parallel_size > 1 else None
        self._steps = 0
        self._kinds: set[str] = set()
        self._updates = 0
        has_copies = layout.tensor_parallel_size > 1 or layout.data_parallel_size > 1
        self._buffers = ChangedBuffers(module) if has_copies else None
        self._tensor_ranks: TensorRanks | None = None
        if self._buffers is not None and layout.tensor_parallel_size > 1:
            self._tensor_ranks = TensorRanks(
                module, loop, mesh[TENSOR_AXIS], self._buffers, warns=layout.data_rank == 0
            )

    @contextmanager
    def at(self, method: str, batch: object) -> Iterator[Shown]:
        """Check the step that runs inside; the caller stores its result in the yielded ``Shown.output``."""
        module, layout = self._module, self._layout
        if method == "training_step":
            self._steps += 1
            if self._buffers is not None:
                self._buffers.begin()
            if self._steps <= _STEPS:
                self.join_copies()
            elif self._copies is not None:
                self._copies.join_for_step()
        shown = Shown()
        with ExitStack() as looks:
            if self._of_blocks:
                looks.enter_context(unchanged(module, self._of_blocks, method))
            if method not in self._kinds:
                self._kinds.add(method)
                check_same_batch(batch, layout, self._loop.strategy)
                looks.enter_context(self._own_calls.watched())
                if self._tensor_ranks is not None:
                    looks.enter_context(self._tensor_ranks.comparing_what_is_shown(method, shown))
                if method == "training_step":
                    refuse_parameter_hooks(module)
            yield shown
            if method == "training_step" and self._steps in tensor_ranks.STEPS:
                self._check_losses(shown.output)

    def _check_losses(self, output: object) -> None:
        """Compare losses between ranks that must compute the same; a collective call over these."""
        axis = self._mesh[TENSOR_AXIS].get_group() if self._tensor_ranks is not None else None
        if (ranks := self._context or axis) is not None:
            shares = self._context is not None
            tensor_ranks.check_losses(output, ranks, shares_sequences=shares, in_32_bits=self._loop.in_32_bits)

    def join_copies(self, *, tolerates: bool = False) -> dict[str, str]:
        """As ``CopiesOfStages.join``; after the first steps a run isn't ended by what can't be joined."""
        if self._copies is None:
            return {}
        is_early = self._steps <= _STEPS
        return self._copies.join(is_early=is_early, tolerates=tolerates or not is_early)

    def after_update(self) -> None:
        """Run checks after an optimizer step: what no save can hold fails at once, not at the first save."""
        if not self._updates:
            self._check_saved()
        layout, buffers = self._layout, self._buffers
        if self._updates < _UPDATES and buffers is not None and layout.data_parallel_size > 1:
            warns = layout.data_rank == layout.tensor_rank == 0
            buffers.warn_of_data_ranks(self._data, warns=warns)
        if self._updates + 1 in tensor_ranks.STEPS and self._tensor_ranks is not None:
            self._tensor_ranks.check_update()
        self._updates += 1
