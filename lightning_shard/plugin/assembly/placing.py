"""Finds a network's blocks, measures their costs, and assigns them to stages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import PlacementError
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing, chosen
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, largest_modules
from lightning_shard.pipeline.cost import ModelCost, measure, watch
from lightning_shard.pipeline.placement import Placement, Policy, place
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.example import calls_on_example, example_of, part_of, restoring_state
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.schedule_choice import agree, choose, fitting_schedules

_LITTLE = 0.2
"""A stage that has less than this of an even share of the cost isn't worth its ranks."""


def blocks_of(module: nn.Module, settings: Settings, stages: int) -> Blocks | None:
    """The blocks; ``None`` if none are found, with a single stage, which doesn't need them."""
    if stages == 1 and settings.pipeline_blocks is None:
        return find_blocks(module) if block_lists(module) else None
    return find_blocks(module, settings.pipeline_blocks, partial(calls_on_example, module))


def place_blocks(
    module: nn.Module,
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
    blocks, cost = costs_of(module, blocks, runs=layout.pipeline_parallel_size > 1)
    cost = as_run(cost, settings.activation_checkpointing, compiled=bool(settings.compile_blocks))
    if layout.pipeline_parallel_size == 1:
        of_one = place(cost, 1, "even", devices=devices_of(layout, device.type), ranks=layout.stages())
        return blocks, of_one, schedules[0]  # whatever stages it has: without a pipeline no schedule has an effect

    def placed(schedule: Schedule) -> Placement:
        return placed_on(schedule, cost, settings.placement, layout, device.type)

    fitting = fitting_schedules(schedules, len(blocks), settings.placement)
    choice = choose(fitting, placed, settings.of_blocks, has_data_ranks=layout.data_parallel_size > 1)
    schedule = agree(fitting, choice, groups)
    placement = placed(schedule)
    if layout.rank == 0 and settings.placement == "auto":
        warn_of_idle_stages(module, cost, placement)
    if isinstance(module, pl.LightningModule):
        module.example_input_array = None  # Lightning's summary would call the module on it, outside of any step
    return blocks, placement, schedule


def placed_on(schedule: Schedule, cost: ModelCost, policy: Policy, layout: Layout, device_type: str) -> Placement:
    """The placement of blocks on a schedule's stages."""
    devices, ranks = devices_of(layout, device_type), layout.stages()
    holders = [schedule.rank_of[stage] for stage in range(schedule.stages)]
    own, of = [devices[rank] for rank in holders], [ranks[rank] for rank in holders]
    return place(cost, schedule.stages, policy, devices=own, ranks=of)


def warn_of_idle_stages(module: nn.Module, cost: ModelCost, placement: Placement) -> None:
    """Warn of a stage that has next to nothing to do, with the blocks that would share the cost better if there are."""
    stages, (least, share) = len(placement.stages), _least(placement)
    if share * stages >= _LITTLE:
        return
    held = placement.stages[least]
    remedy, lists = "", largest_modules(module)
    with warnings.catch_warnings(), suppress(PlacementError):
        warnings.simplefilter("ignore")  # a run for the costs warned already
        blocks = find_blocks(module, lists) if lists else None
        if blocks is not None and len(blocks) >= stages:
            _, better = _least(place(costs_of(module, blocks, runs=True)[1], stages))
            if better > 2 * share:
                remedy = (
                    f"pipeline_blocks={lists} would leave no stage below {100 * better:.1f} %, if these run one after"
                    " the other, each once."
                )
    if not remedy:
        parts = {part.name: part for part in (*cost.blocks, *cost.before, *(p for _, p in cost.between), *cost.after)}
        largest = max(parts.values(), key=lambda part: part.flops or part.parameters)
        remedy = (
            f"No other cut between modules is much better; the largest is {largest.name}: use fewer stages, or data"
            " ranks alone (pipeline_parallel_size=1)."
        )
    names = held.names[0] + (f" to {held.names[-1]}" if len(held.names) > 1 else "")
    rank_zero_warn(
        f"Of {stages} pipeline stages, stage {least} ({names}) has {100 * share:.1f} % of the network's cost, less than"
        f" a fifth of an even share, so its ranks wait most of the time. {remedy}"
    )


def _least(placement: Placement) -> tuple[int, float]:
    """The stage of the least cost, and its share."""
    costs = [stage.cost for stage in placement.stages]
    return costs.index(min(costs)), min(costs) / max(1, sum(costs))


def costs_of(module: nn.Module, blocks: Blocks, *, runs: bool) -> tuple[Blocks, ModelCost]:
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
