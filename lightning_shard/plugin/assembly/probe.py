"""Runs code of a module in order to observe it, or so that it can run again: state that a run changes is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_shard.lightning_private import logging_by
from lightning_shard.parallel.experts.module_lists import RestoreAndReplay
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.direct_output import DirectOutput
from lightning_shard.state.tree_state import take


class RunChanges(NamedTuple):
    """Access to what runs of a module's code have changed."""

    changed: Callable[[], list[str]]
    restore: Callable[[], None]


@contextmanager
def trial_runs(device: torch.device, module: nn.Module) -> Iterator[RunChanges]:
    """Snapshot what a run of the module's code may change: its state and the generators; yields how to restore it."""
    taken, put_generators_back = take(module), randomness.remember(device)

    def restore() -> None:
        try:
            taken.put_back()
        finally:
            put_generators_back()

    try:
        yield RunChanges(taken.changed, restore)
    finally:
        taken.forget()


@contextmanager
def trial_runs_of_step(device: torch.device, module: pl.LightningModule) -> Iterator[RunChanges]:
    """The same for a LightningModule's step; inside, nothing is logged or printed by the module's own means."""
    own = vars(module)
    before = own.get("log")
    own["log"] = _log_nothing
    try:
        with logging_by(module, _log_nothing), DirectOutput(module).watched(), trial_runs(device, module) as changes:
            yield changes
    finally:
        del own["log"]
        if before is not None:
            own["log"] = before


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


@contextmanager
def two_runs(device: torch.device, module: nn.Module) -> Iterator[RestoreAndReplay]:
    """Yield what a second run of a module's code needs: how to restore its state and draw the same numbers."""
    taken, put_generators_back = take(module), randomness.remember(device)

    @contextmanager
    def same_draws() -> Iterator[None]:
        with randomness.preserved(device):
            put_generators_back()
            yield

    try:
        yield taken.put_back, same_draws
    finally:
        taken.forget()
