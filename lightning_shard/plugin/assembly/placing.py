"""Finds a network's blocks, measures their costs, and assigns them to stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing, chosen
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks
from lightning_shard.pipeline.cost import ModelCost, measure, watch
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.example import calls_on_example, example_of, part_of, restoring_state
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.schedule_choice import agree, choose, fitting_schedules


def blocks_of(module: pl.LightningModule, settings: Settings, stages: int) -> Blocks | None:
    """The blocks; ``None`` if none are found, with a single stage, which doesn't need them."""
    if stages == 1 and settings.pipeline_blocks is None:
        return find_blocks(module) if block_lists(module) else None
    return find_blocks(module, settings.pipeline_blocks, partial(calls_on_example, module))


def place_blocks(
    module: pl.LightningModule,
    blocks: Blocks,
    layout: Layout,
    settings: Settings,
    schedules: Sequence[Schedule],
    groups: Groups,
    device: torch.device,
) -> tuple[Blocks, Placement, Schedule]:
    """Assign blocks to stages.

    Returns:
        The blocks in running order, if an example run shows it; their placement; and the chosen schedule.
    """
    ranks, devices = layout.stages(), devices_of(layout, device.type)
    blocks, cost = costs_of(module, blocks, runs=layout.pipeline_parallel_size > 1)
    cost = as_run(cost, settings.activation_checkpointing, compiled=bool(settings.compile_blocks))
    if layout.pipeline_parallel_size == 1:
        return blocks, place(cost, 1, "even", devices=devices, ranks=ranks), schedules[0]
    module.example_input_array = None  # Lightning's summary would call the module on it, outside of any step

    def placed(schedule: Schedule) -> Placement:
        holders = [schedule.rank_of[stage] for stage in range(schedule.stages)]
        return place(
            cost,
            schedule.stages,
            settings.placement,
            devices=[devices[rank] for rank in holders],
            ranks=[ranks[rank] for rank in holders],
        )

    fitting = fitting_schedules(schedules, len(blocks), settings.placement)
    choice = choose(fitting, placed, settings.of_blocks, has_data_ranks=layout.data_parallel_size > 1)
    schedule = agree(fitting, choice, groups)
    return blocks, placed(schedule), schedule


def costs_of(module: pl.LightningModule, blocks: Blocks, *, runs: bool) -> tuple[Blocks, ModelCost]:
    """The costs of blocks and parts, and the blocks in running order.

    Args:
        runs: Whether to run the network on an example, if there is one; otherwise costs are estimated.
    """
    run = example_of(module, blocks) if runs else None
    seen = None
    if run is not None:
        watched = {name: part_of(module, name) for name in (*blocks.names, *(name for name, _ in blocks.parts))}
        with restoring_state(module):
            seen = watch(watched, run, module.get_submodule(blocks.network))
    if seen is not None:
        blocks = blocks.ordered(seen.calls)
    cost = measure(
        zip(blocks.names, blocks.modules(module)),
        {name: (place, part_of(module, name)) for name, place in blocks.parts},
        seen,
        _on_every_stage(module, blocks),
    )
    return blocks, cost


def as_run(cost: ModelCost, activation_checkpointing: Recomputing, *, compiled: bool = False) -> ModelCost:
    """The costs of blocks once settings recompute or compile them."""
    recomputed = chosen(len(cost.blocks), activation_checkpointing)
    return cost.as_run(recomputed, keeps_products=activation_checkpointing == "selective", compiled=compiled)


def devices_of(layout: Layout, kind: str) -> list[str]:
    """A name for each stage's devices, by ranks, since only each process knows its own device's index."""
    spans = layout.stages()
    return [f"{kind} {span[0]}" + (f"–{span[-1]}" if len(span) > 1 else "") for span in spans]


def _on_every_stage(module: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """The modules with parameters that aren't cut, by name: frozen ones outside of the network."""
    cut = {name.partition(".")[0] for name in (blocks.network, *blocks.names, *dict(blocks.parts))}
    beside = {name: child for name, child in module.named_children() if name not in cut}
    return {name: child for name, child in beside.items() if any(True for _ in child.parameters())}
