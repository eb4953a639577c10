"""Warns hooks that ask a Trainer for its number of ranks, where a batch isn't dealt to as many.

``lr * self.trainer.world_size`` is common where all ranks are data ranks. The ranks of a pipeline, and tensor ranks,
read the same batch, so the rate would be too high and nothing would fail.
"""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.layout import Layout


def warn_of_number_of_ranks(layout: Layout, hook: str) -> None:
    rank_zero_warn(
        f"{hook} asks for world_size, which is the number of ranks, {layout.world_size}; batches are dealt to"
        f" {layout.data_parallel_size} data ranks, and each batch's samples are computed by several ranks. To scale"
        " learning rates or to count samples take trainer.strategy.layout.data_parallel_size;"
        " trainer.estimated_stepping_batches counts steps."
    )
