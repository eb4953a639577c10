"""Warns code that asks a Trainer for its number of ranks, where a batch isn't dealt to as many.

``lr * self.trainer.world_size`` is common where all ranks are data ranks. The ranks of a pipeline, and tensor ranks,
read the same batch, so the rate would be too high and nothing would fail.
"""

from __future__ import annotations

import sys
import warnings

from lightning_shard.layout import Layout

_OWN = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_shard")


def warn_users_code(layout: Layout) -> None:
    """Warn if the strategy's ``world_size``, which calls this, or the Trainer's was asked for by a user's code."""
    asking = sys._getframe(2)
    if asking.f_code.co_name == "world_size":
        asking = asking.f_back or asking
    if layout.data_parallel_size == layout.world_size or asking.f_globals.get("__name__", "").split(".")[0] in _OWN:
        return
    warnings.warn(
        f"world_size is the number of ranks, {layout.world_size}; batches are dealt to {layout.data_parallel_size} data"
        " ranks, and each batch's samples are computed by several ranks. To scale learning rates or to count samples"
        " take trainer.strategy.layout.data_parallel_size; trainer.estimated_stepping_batches counts steps.",
        stacklevel=4,
    )
