"""Finds a network's blocks, assigns them to stages by cost, and cuts a module to the stages of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_shard.errors import PlacementError
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing, chosen
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, names_of_parameters
from lightning_shard.pipeline.cost import ModelCost, measure, watch
from lightning_shard.pipeline.placement import Placement, Policy, place
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.stages.cut import cut
from lightning_shard.pipeline.stages.parts import part_of
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Network
from lightning_shard.pipeline.stages.tied import Tie, find_ties, over_ranks
from lightning_shard.plugin.assembly.probe import calls_on_example, example_of, restoring_state
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.schedule_choice import agree, choose, fitting_schedules
from lightning_shard.torch_private import NormOfChannels


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
    if isinstance(module, pl.LightningModule):
        module.example_input_array = None  # Lightning's summary would call the module on it, outside of any step
    return blocks, placement, schedule


def placed_on(schedule: Schedule, cost: ModelCost, policy: Policy, layout: Layout, device_type: str) -> Placement:
    """The placement of blocks on a schedule's stages."""
    devices, ranks = devices_of(layout, device_type), layout.stages()
    holders = [schedule.rank_of[stage] for stage in range(schedule.stages)]
    own, of = [devices[rank] for rank in holders], [ranks[rank] for rank in holders]
    return place(cost, schedule.stages, policy, devices=own, ranks=of)


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


_LIBRARIES = ("torch.", "transformers.")


@dataclass(frozen=True)
class OwnPart:
    """What a cut left on this rank; see :class:`Assembly`.

    Attributes:
        ties_of_stages: Parameters that several stages hold, whether or not these are on one rank.
        beside: Modules that every stage holds as a whole: frozen ones outside of the network, with all that is in them.
    """

    stages: Stages | None = None
    saved_elsewhere: frozenset[str] = frozenset()
    ties: tuple[Tie, ...] = ()
    ties_of_stages: Sequence[Tie] = ()
    beside: frozenset[nn.Module] = frozenset()


def cut_to_rank(
    module: nn.Module,
    blocks: Blocks,
    placement: Placement,
    schedule: Schedule,
    rank: int,
    device: torch.device,
) -> OwnPart:
    """Cut a module to the stages of one pipeline rank."""
    elsewhere = set() if rank == len(schedule.rows) - 1 else _names_on_every_stage(module, blocks)
    _refuse_pre_hooks(module, blocks, placement)
    holders = Holders(blocks, placement)
    of_stages = find_ties(names_of_parameters(module), holders.of)
    of_ranks = over_ranks(of_stages, schedule.rank_of)
    shared = _buffers_of_several_stages(module, holders)
    ties = tuple(tie for tie in of_ranks if rank in tie.holders)
    elsewhere |= {name for tie in ties if rank != tie.holders[-1] for name in tie.names}
    stages_of_names = {name: holders.of(name) for names in shared.values() for name in names}
    elsewhere |= {name for name, of in stages_of_names.items() if of and schedule.rank_of[max(of)] != rank}
    stages = cut_to(module, holders, schedule.stages_of(rank), of_stages, device)
    stages.shared_buffers.update(shared)
    return OwnPart(stages, frozenset(elsewhere), ties, of_stages, _beside_the_network(module, blocks))


class Holders:
    """Maps blocks and parts to the stages that hold them."""

    def __init__(self, blocks: Blocks, placement: Placement) -> None:
        self.blocks = blocks
        self.placement = placement
        self.of_block = [placement.stage_of(index) for index in range(len(blocks))]
        self.of_part = {name: self._at(place) for name, place in blocks.parts}

    def _at(self, place: int) -> int:
        return self.of_block[min(place, len(self.of_block) - 1)]

    def of(self, name: str) -> set[int]:
        """The stages that use a parameter; empty for one outside of blocks and parts, which every stage has."""
        uses = [*zip(self.blocks.names, self.of_block), *self.of_part.items()]
        return {stage for used, stage in uses if name == used or name.startswith(f"{used}.")}


def cut_to(
    module: nn.Module, holders: Holders, own: Sequence[int], ties: Sequence[Tie], device: torch.device
) -> Stages:
    """Cut a module to the stages with these indices."""
    blocks, stages = holders.blocks, len(holders.placement.stages)
    network = Network(blocks.network, blocks.names, holders.of_block, holders.of_part, stages)
    kept = {stage: {name for tie in ties if stage in tie.holders for name in tie.names} for stage in own}
    return cut(module, network, own, kept, device)


def _refuse_pre_hooks(module: nn.Module, blocks: Blocks, placement: Placement) -> None:
    """Refuse forward pre-hooks inside of blocks, which may change arguments: other stages replay forward hooks only."""
    for name in blocks.names[: placement.stages[-1].blocks.start]:
        for inner, part in module.get_submodule(name).named_modules():
            hooks = part._forward_pre_hooks.values()
            of_users = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES)]
            if inner and of_users:
                raise PlacementError(
                    f"{name}.{inner} has a forward pre-hook, which runs on the stage that holds {name} only: use a"
                    " forward hook, which is given the arguments too, or pipeline_parallel_size=1.",
                    breaks=3,
                )


def _cut_away(blocks: Blocks) -> tuple[str, ...]:
    return tuple(f"{name}." for name in (blocks.network, *blocks.names, *dict(blocks.parts)))


def _beside_the_network(module: nn.Module, blocks: Blocks) -> frozenset[nn.Module]:
    if not blocks.network:  # the LightningModule itself
        return frozenset()
    cut_away = _cut_away(blocks)
    found = {f"{name}.": part for name, part in module.named_modules() if name}
    return frozenset(
        part
        for name, part in found.items()
        if not any(name.startswith(each) or each.startswith(name) for each in cut_away)
    )


def _names_on_every_stage(module: nn.Module, blocks: Blocks) -> set[str]:
    """State-dict names of modules that aren't cut: those outside of the network that don't train."""
    cut_away = _cut_away(blocks) if blocks.network else ("",)
    return {name for name in module.state_dict(keep_vars=True) if not f"{name}.".startswith(cut_away)}


def _buffers_of_several_stages(module: nn.Module, holders: Holders) -> dict[str, list[str]]:
    """Saved buffers of modules that several stages hold: the first name of each, and all of its names.

    Steps may not change them (``checks/buffers.py``).
    """
    places: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        places.setdefault(id(part), []).append(name)
    found: dict[str, list[str]] = {}
    for names in places.values():
        if len({stage for name in names for stage in holders.of(f"{name}.")}) < 2:
            continue
        part = module.get_submodule(names[0])
        held = {name for name, buffer in part._buffers.items() if buffer is not None}
        buffers = [*(held - part._non_persistent_buffers_set)]
        has_more = type(part).get_extra_state is not nn.Module.get_extra_state
        if has_more or (buffers and isinstance(part, NormOfChannels)):
            raise PlacementError(
                f"{names[0]} is in several places, on several pipeline stages, and has"
                f" {'extra state' if has_more else 'statistics'}, of which each stage would have a copy that changes by"
                " itself: use one module per call, which may share their weights, or pipeline_parallel_size=1.",
                breaks=6,
            )
        found |= {f"{names[0]}.{key}": [f"{name}.{key}" for name in names] for key in buffers}
    return found
