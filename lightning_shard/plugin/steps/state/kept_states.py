"""Follows the state that steps change after the network for all stages of a rank (``after_network.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps.state.after_network import KeptState, Name
from lightning_shard.plugin.steps.state.per_stage import StatesApart


class KeptStates:
    """Tracks all stages of one rank: the last stage by itself, those before it together.

    Args:
        root: Cut and sharded.
        stages: This rank's.
        apart: The stages' versions of the module's state.
    """

    def __init__(self, root: nn.Module, stages: Stages, apart: StatesApart) -> None:
        hollow = {name for stage in stages for name in stage.hollow}

        def kept(stage: Stage) -> KeptState:
            # a rank that holds the last stage has the state of its parts
            of_all = stage.last_parts if stage.is_last or not stages.is_last else ()
            parts = [part for part in stage.parts if part not in of_all]
            return KeptState(
                root,
                stage.blocks,
                parts,
                is_last=stage.is_last,
                elsewhere=stage.elsewhere,
                hollow=hollow,
                last_parts=stage.last_parts,
            )

        self._stages = stages
        self._apart = apart
        self._early = [stage for stage in stages if not stage.is_last]
        self._of_early = kept(self._early[-1]) if self._early else None
        self._of_last = kept(stages[-1]) if stages.is_last else None

    def step(self, stage: Stage, *, searching: bool) -> AbstractContextManager[None]:
        kept = self._of_last if stage.is_last else self._of_early
        assert kept is not None
        return kept.step(searching=searching)

    def check_numbers(self, stage: Stage) -> None:
        """At a step's end on the last stage, inside of what it runs in: check what can't be sent to others.

        Raises:
            StepError: It has set a number on a block of another stage.
        """
        runs_everywhere = stage.calls is not None  # to its end, on all ranks
        if stage.is_last and self._of_last is not None and not runs_everywhere:
            self._of_last.check_numbers()

    def remember(self) -> Callable[[], None]:
        """Snapshot what is known of the batch; returns a function that restores it."""
        forgets = [kept.remember() for kept in (self._of_early, self._of_last) if kept is not None]

        def forget() -> None:
            for each in forgets:
                each()

        return forget

    def changes(self) -> dict[Name, Any]:
        """On the last stage's rank, at the end of a batch: what has changed, to be sent to the others."""
        assert self._of_last is not None
        self._apart.show(self._stages[-1])
        return self._of_last.changes()

    def take(self, changes: Mapping[Name, Any], microbatches: int, device: torch.device) -> None:
        """On every rank, at the end of a batch: take over the last stage's values.

        Raises:
            StepError: An earlier stage here has read one before, with another value than a single process would have.
        """
        if self._of_early is not None:
            if self._of_last is None:
                self._apart.settle()
            else:
                self._apart.show(self._early[-1])
            self._of_early.take(changes, microbatches, device)
            if changes:
                self._apart.changed()
        if self._of_last is not None:
            self._apart.settle()
