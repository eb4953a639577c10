"""What asks for the number of ranks, and means that of models: Lightning's monitor, and users' hooks.

ThroughputMonitor's rates over all devices are rank 0's times the world size, and the ranks of a pipeline and of a
tensor group work on one batch together: so each device's rates, and its utilisation (MFU), are set to its share.

Hooks that compute ``lr * self.trainer.world_size`` are warned where a batch isn't dealt to as many ranks.

Private in Lightning 2.6, used here: ``ThroughputMonitor._throughputs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.layout import Layout


def share_throughput(callbacks: Iterable[pl.Callback], layout: Layout) -> None:
    """Make each device's rates its share of its model's. To be called after callbacks are set up."""
    ranks_per_model = layout.world_size // layout.data_parallel_size
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                vars(throughput)["compute"] = partial(_shared, throughput, ranks_per_model)


def _shared(throughput: Throughput, ranks_per_model: int) -> dict[str, Any]:
    metrics = type(throughput).compute(throughput)
    rates = ("_per_sec", f"{throughput.separator}mfu")
    return {name: value / ranks_per_model if name.endswith(rates) else value for name, value in metrics.items()}


def warn_of_number_of_ranks(layout: Layout, hook: str) -> None:
    rank_zero_warn(
        f"{hook} asks for world_size, which is the number of ranks, {layout.world_size}; batches are dealt to"
        f" {layout.data_parallel_size} data ranks, and each batch's samples are computed by several ranks. To scale"
        " learning rates or to count samples take trainer.strategy.layout.data_parallel_size;"
        " trainer.estimated_stepping_batches counts steps."
    )
