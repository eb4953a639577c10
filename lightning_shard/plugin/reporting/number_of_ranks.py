"""Warns code that asks a Trainer for its number of ranks, where a batch isn't dealt to as many.

``lr * self.trainer.world_size`` is common where all ranks are data ranks. The ranks of a pipeline, and tensor ranks,
read the same batch, so the rate would be too high and nothing would fail.
"""

from __future__ import annotations

import sys
import warnings

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_shard.layout import Layout

_OWN = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_shard")
_OF_TRAINER = pl.Trainer.world_size.fget.__code__  # type: ignore[attr-defined]


def warn_users_code(layout: Layout) -> None:
    """Warn, on rank 0, if a user's code asks for the strategy's ``world_size``, which calls this, or the Trainer's."""
    asking, depth = sys._getframe(2), 3
    if asking.f_code is _OF_TRAINER:
        asking, depth = asking.f_back or asking, depth + 1
    if layout.data_parallel_size == layout.world_size or asking.f_globals.get("__name__", "").split(".")[0] in _OWN:
        return
    if rank_zero_only.rank:  # type: ignore[attr-defined]
        return
    warnings.warn(
        f"world_size is the number of ranks, {layout.world_size}; batches are dealt to {layout.data_parallel_size} data"
        " ranks, and each batch's samples are computed by several ranks. To scale learning rates or to count samples"
        " take trainer.strategy.layout.data_parallel_size; trainer.estimated_stepping_batches counts steps.",
        stacklevel=depth,
    )
