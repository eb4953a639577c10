"""Lightning's monitor of throughput, which asks for the number of ranks, and means that of models.

ThroughputMonitor's rates over all devices are rank 0's times the world size, and the ranks of a pipeline and of a
tensor group work on one batch together: so each device's rates, and its utilisation (MFU), are set to its share.

Private in Lightning 2.6, used here: ``ThroughputMonitor._throughputs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor

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
