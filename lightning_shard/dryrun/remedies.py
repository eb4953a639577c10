"""Finds changes of settings or sizes that make a plan fit into the devices' memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_shard.dryrun.planned import Plan, Remedy, Run
from lightning_shard.dryrun.planner import Planner
from lightning_shard.errors import ShardError
from lightning_shard.layout import Layout


def remedies(planner: Planner, made: Plan) -> Iterator[Remedy]:
    """Yield changes that make a plan fit, the cheapest first."""
    for setting, layout, run in _changes(made):
        try:
            changed = planner.plan(layout, run, made.device_memory)
        except ShardError:
            continue  # the batch or the module can't be cut that way
        if changed.fits:
            yield Remedy(setting, changed.peak_bytes)
            if layout == made.layout:
                return  # changes that cost more time aren't needed


def _changes(made: Plan) -> Iterator[tuple[str, Layout, Run]]:
    """The changes to try, from those that cost nothing to those that cost most."""
    layout, run, held = made.layout, made.run, made.run.held
    if layout.pipeline_parallel_size > 1:
        for times in (2, 4, 8):
            more = replace(run, microbatches=times * run.microbatches)
            yield f"microbatches={more.microbatches}", layout, more
    settings: list[dict[str, Any]] = []
    if not held.activation_checkpointing:
        settings += [{"activation_checkpointing": "selective"}, {"activation_checkpointing": True}]
    whole = {"activation_checkpointing": True}
    if layout.pipeline_parallel_size > 1 and not held.reshard_after_forward and layout.shard_size > 1:
        settings += [{"reshard_after_forward": True}, {**whole, "reshard_after_forward": True}]
        each = {"reduce_each_microbatch": True, "reshard_after_forward": True}
        settings += [each, {**whole, **each}]
    if not held.cpu_offload:
        settings += [{"cpu_offload": True}, {**whole, "cpu_offload": True}]
    for changed in settings:
        text = " ".join(f"{name}={value}" for name, value in changed.items())
        yield text, layout, replace(run, held=replace(held, **changed))
    for other in _other_sizes(layout):
        yield f"the sizes {other}", other, run


def _other_sizes(layout: Layout) -> Iterator[Layout]:
    """Layouts of the same number of ranks, with the model split over twice as many of them."""
    if layout.data_parallel_size % 2 == 0 and layout.data_parallel_replicas == layout.expert_parallel_size == 1:
        half = layout.data_parallel_size // 2
        yield replace(layout, data_parallel_size=half, tensor_parallel_size=2 * layout.tensor_parallel_size)
        yield replace(layout, data_parallel_size=half, pipeline_parallel_size=2 * layout.pipeline_parallel_size)
    if layout.data_parallel_replicas > 1:
        yield replace(layout, data_parallel_replicas=1)
