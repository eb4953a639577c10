"""Makes what runs the steps of a module that was laid out, and what checks and ends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.lockstep import Lockstep
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import sharded_units
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.limits import refuse_synced_generation
from lightning_shard.plugin.steps.alike import Alike
from lightning_shard.plugin.steps.checks.buffers import SharedBuffers
from lightning_shard.plugin.steps.checks.copies_of_stages import CopiesOfStages
from lightning_shard.plugin.steps.checks.own_calls import OwnCalls
from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans, warn_of_balancing
from lightning_shard.plugin.steps.first_step import FirstStepChecks, StageChecks
from lightning_shard.plugin.steps.gradients import Gradients
from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.plugin.steps.loss_weight import LossWeights, Shares
from lightning_shard.plugin.steps.metrics import SharedMetrics
from lightning_shard.plugin.steps.pipelined import Cut, PipelinedSteps
from lightning_shard.plugin.steps.schedule_choice import effective_schedule
from lightning_shard.plugin.steps.single_stage import SingleStageSteps
from lightning_shard.plugin.steps.stage_units import StageUnits


@dataclass(frozen=True)
class Steps:
    """What runs the steps of one module, its gradients, and the checks of its first steps."""

    run: PipelinedSteps | SingleStageSteps
    gradients: Gradients
    first_checks: FirstStepChecks


def make_steps(
    module: Any,
    known: Assembly,
    loop: Loop,
    groups: Groups,
    mesh: DeviceMesh,
    device: torch.device,
    weigh: Callable[[Any], Any] | None,
    check_saved: Callable[[], None],
    *,
    reduces_each: bool,
    syncs_batch_norm: bool,
) -> Steps:
    """Make the steps of a module; a collective call over all ranks.

    Args:
        module: Cut and sharded; with one stage a LightningModule.
        known: How it was laid out.
        loop: The loop that will run them.
        mesh: The world's.
        weigh: The weight of a batch's loss; ``None``: all count equally.
        check_saved: Refuses what could not be saved; a collective call over all ranks.
        reduces_each: Whether each backward reduces gradients over the data ranks.
        syncs_batch_norm: Whether BatchNorm's statistics are those of all data ranks.
    """
    layout, stages = known.layout, known.stages
    metrics = known.metrics = known.metrics or SharedMetrics(groups, device, stages)
    parts = known.schedule.microbatches if stages is not None else 1
    means = UnequalMeans(parts, groups.data, is_weighted=weigh is not None)
    shares = Shares(LossWeights(weigh, groups.data, device), means, metrics.means)
    warn_of_balancing(module, parts * layout.data_parallel_size)
    gradients = Gradients(module, loop, groups.gradient, reduces_each=reduces_each, is_pipelined=stages is not None)
    of_blocks = stages.shared_buffers if stages is not None else ()
    copies = None
    if stages is not None:
        gather, whole = groups.gather_over_stages, loop.whole_parameters
        copies = CopiesOfStages(module, of_blocks, gather, groups.pipeline, device, whole)
    own_calls, has_data_ranks = OwnCalls(stages), layout.data_parallel_size > 1
    of_stages = StageChecks(copies, SharedBuffers(module, of_blocks), own_calls)
    checks = FirstStepChecks(module, loop, layout, mesh, groups, check_saved, of_stages)
    run: PipelinedSteps | SingleStageSteps
    if stages is None:
        if has_data_ranks and known.lockstep is None:
            units = [unit for unit in sharded_units(module) if unit is not module]
            known.lockstep = Lockstep(units, groups.host, deals_experts=layout.expert_parallel_size > 1)
        bypassed = BypassedUnits(module, groups.data, device) if has_data_ranks else None
        weights, lockstep = shares.weights, known.lockstep
        run = SingleStageSteps(module, device, layout.data_rank, gradients, weights, means, bypassed, lockstep)
        return Steps(run, gradients, checks)
    reshard(module)
    refuse_synced_generation(module)
    reshards = known.settings.reshard_after_forward is True
    forwards_call = has_data_ranks and (reshards or layout.expert_parallel_size > 1 or syncs_batch_norm)
    alike = Alike(
        groups,
        own_calls,
        layout.data_parallel_size,
        forwards_call=forwards_call,
        rehearses=not groups.any(not known.settings.rehearse)[0],
    )
    cut = Cut(stages, effective_schedule(known.schedule, known.settings.of_blocks), known.ties)
    stage_units = StageUnits(
        module,
        BypassedUnits(module, None, device) if reshards and has_data_ranks else None,
        splits=cut.schedule.splits_backwards,
        reduces_each=reduces_each,
        reshards_each=reshards,
    )
    run = PipelinedSteps(module, loop, cut, groups, layout, shares, alike, stage_units)
    return Steps(run, gradients, checks)
