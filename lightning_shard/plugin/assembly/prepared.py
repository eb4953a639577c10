"""The strategy's base class for setup: makes a LightningModule this rank's part, and sets up steps and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard import lightning_private
from lightning_shard.parallel.batch_norm import synchronize
from lightning_shard.parallel.fsdp import as_tensors
from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.part_calls import Lockstep
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import sharded_units
from lightning_shard.parallel.init import put_on_units
from lightning_shard.plugin.assembly.assemble import Assembly, assemble
from lightning_shard.plugin.assembly.parameters import (
    all_parameters,
    refuse_frozen,
    replace_kept,
    what_trains,
)
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.limits import refuse
from lightning_shard.plugin.optimizers.finetuning import (
    add_unfrozen_groups,
    adding_new_parameters,
    finetuning_callbacks,
)
from lightning_shard.plugin.optimizers.sharded import Built, prepare
from lightning_shard.plugin.reporting.summary import (
    report_placement,
    report_whole,
    share_throughput,
    summarize_before,
)
from lightning_shard.plugin.saving.averaging import average_shards
from lightning_shard.plugin.saving.beside_tensors import warn_of_unstorable_buffers
from lightning_shard.plugin.saving.checkpointed import UNTIL_SETUP, CheckpointedStrategy
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.batches import Alike, OwnCalls
from lightning_shard.plugin.steps.checks.stage_parameters import StageParameters
from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans
from lightning_shard.plugin.steps.first_step import FirstStepChecks
from lightning_shard.plugin.steps.gradient_norms import WholeNorms
from lightning_shard.plugin.steps.gradients import Gradients, StageUnits
from lightning_shard.plugin.steps.loop import Loop, TrainerLoop
from lightning_shard.plugin.steps.loss_weight import LossWeights, Shares, agree_on_overflows
from lightning_shard.plugin.steps.metrics import SharedMetrics
from lightning_shard.plugin.steps.pipelined import PipelinedSteps
from lightning_shard.plugin.steps.schedule_choice import effective_schedule, evaluation_schedules
from lightning_shard.plugin.steps.single_stage import SingleStageSteps
from lightning_shard.torch_private import (
    allowing_empty_optimizers,
    parametrizations_leaving_what_is_given,
    take_mark_of_fsdp,
)


@dataclass(frozen=True)
class Steps:
    """What runs the steps of one module, its gradients, the checks of its first steps, and its metrics."""

    run: PipelinedSteps | SingleStageSteps
    gradients: Gradients
    first_checks: FirstStepChecks
    metrics: SharedMetrics


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
    """Make the steps of a module that was laid out; a collective call over all ranks.

    Args:
        module: With one stage a LightningModule.
        check_saved: Refuses what could not be saved; a collective call over all ranks.
    """
    layout, stages = known.layout, known.stages
    metrics = known.metrics = known.metrics or SharedMetrics(groups, device, stages)
    parts = known.schedule.microbatches if stages is not None else 1
    means = UnequalMeans(parts, groups.data, is_weighted=weigh is not None)
    shares = Shares(LossWeights(weigh, groups.data, device), means, metrics)
    gradients = Gradients(module, loop, groups.gradient, reduces_each=reduces_each, is_pipelined=stages is not None)
    own_calls, has_data_ranks = OwnCalls(stages), layout.data_parallel_size > 1
    checks = FirstStepChecks(module, loop, known, mesh, groups, device, own_calls, check_saved)
    run: PipelinedSteps | SingleStageSteps
    if stages is None:
        if has_data_ranks and known.lockstep is None:
            units = [unit for unit in sharded_units(module) if unit is not module]
            known.lockstep = Lockstep(units, groups.host, deals_experts=layout.expert_parallel_size > 1)
        bypassed = BypassedUnits(module, groups.data, device) if has_data_ranks else None
        weights, lockstep = shares.weights, known.lockstep
        run = SingleStageSteps(module, device, layout.data_rank, gradients, weights, means, bypassed, lockstep)
        return Steps(run, gradients, checks, metrics)
    reshard(module)
    for network in module.modules():
        if hasattr(network, "generate"):  # transformers' would ask all ranks, before each call, whether they are done
            take_mark_of_fsdp(network)
    reshards = known.settings.reshard_after_forward is True
    forwards_call = has_data_ranks and (reshards or layout.expert_parallel_size > 1 or syncs_batch_norm)
    alike = Alike(
        groups,
        own_calls,
        layout.data_parallel_size,
        forwards_call=forwards_call,
        rehearses=not groups.any(not known.settings.rehearse)[0],
    )
    schedule = effective_schedule(known.schedule, known.settings.of_blocks)
    stage_units = StageUnits(
        module,
        BypassedUnits(module, None, device) if reshards and has_data_ranks else None,
        splits=schedule.splits_backwards,
        reduces_each=reduces_each,
        reshards_each=reshards,
    )
    run = PipelinedSteps(module, loop, known, schedule, groups, shares, alike, stage_units)
    return Steps(run, gradients, checks, metrics)


_ASSEMBLY = "_lightning_shard_assembly"


class PreparedStrategy(CheckpointedStrategy):
    """Assembles the module, and sets up its steps, optimizers and precision.

    It has many attributes: what setup makes, each for other hooks of Lightning's.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._steps: SingleStageSteps | PipelinedSteps = UNTIL_SETUP
        self._gradients: Gradients = UNTIL_SETUP
        self._metrics: SharedMetrics = UNTIL_SETUP
        self._guard: StageParameters = UNTIL_SETUP
        self._of_run = ExitStack()  # closed in teardown
        self._built: Built | None = None
        self._trains: list[dict[str, bool]] = []

    def setup(self, trainer: pl.Trainer) -> None:
        module = self._module
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        lightning_private.forbid_inference_mode(trainer)
        precision = str(self.precision_plugin.precision)
        lightning_private.refuse_precision(precision)
        self._settings = replace(self._settings, gathered_dtype=lightning_private.GATHERED.get(precision))
        refuse(trainer, module, self.layout, self._schedules[0].microbatches)
        if trainer.state.fn == TrainerFn.FITTING:
            warn_of_unstorable_buffers(trainer, module)
        known = module.__dict__.get(_ASSEMBLY)
        self._of_run.close()  # of a setup without a teardown
        self._of_run.enter_context(parametrizations_leaving_what_is_given())
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if self.layout.pipeline_parallel_size > 1:
            lightning_private.record_no_module_names(trainer)
        share_throughput(callbacks, self.layout)
        if known is None:
            known = self._lay_out(trainer, module)
        else:
            known.lay_out_again(self.layout, self._settings, self._schedules)
            known.check_parameters(module, self.groups)
            put_on_units(module, known.attributes)
        if self.layout.pipeline_parallel_size > 1 and known is not self._assembly:  # else this Trainer has printed it
            report_placement(callbacks, self.layout, known.placement)
        if self.layout.world_size > 1:
            report_whole(callbacks, module)
        self._assembly = known
        synchronize(module, self.groups.data if self._syncs_over_data_ranks() else None)
        self.model = module
        self._connect_checkpoint_io(trainer)
        self._make_steps(module, known)
        self._metrics.find(module)
        self.barrier()
        share = partial(self._metrics.share, of_steps=False)  # what steps use is found where an epoch begins
        self._of_run.enter_context(lightning_private.told_of_new_metrics(share))
        self._of_run.enter_context(adding_new_parameters(self.layout.pipeline_parallel_size > 1))
        if trainer.state.fn == TrainerFn.FITTING:
            average_shards(callbacks, module)
        self._guard_hooks()
        self._restore()  # all but optimizers and loops, which Lightning does after the setup; runs users' loading hooks
        self._guard.release()
        if trainer.state.fn == TrainerFn.FITTING:
            known.check_parameters(module, self.groups)  # which loading hooks may have replaced
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING and not self._settings.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)
        self._of_run.enter_context(as_tensors.run())
        self._guard_hooks()

    def _guard_hooks(self, *, shows_all: bool = True) -> None:
        if self.layout.pipeline_parallel_size > 1:
            self._guard.guard(shows_all=shows_all)

    def _lay_out(self, trainer: pl.Trainer, module: pl.LightningModule) -> Assembly:
        """Cut and shard a module that wasn't laid out before."""
        callbacks, schedules = trainer.callbacks, self._schedules  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING:
            schedules = evaluation_schedules(schedules, self._settings.placement)
        self._built, names = Built.of(module), {id(p): name for name, p in module.named_parameters()}
        if self.layout.world_size > 1:
            summarize_before(module, callbacks)
        self.precision_plugin.convert_module(module)
        assembly = assemble(
            module,
            self.layout,
            self.device_mesh,
            self._expert_mesh,
            self.root_device,
            randomness.derive(self._seed, "init"),
            self._settings,
            schedules,
            self.groups,
        )
        replace_kept(module, names, callbacks)
        module.__dict__[_ASSEMBLY] = assembly
        module._device = self.root_device  # Lightning's own: the device to compute on; shards may be on the host
        return assembly

    def _make_steps(self, module: pl.LightningModule, known: Assembly) -> None:
        made = make_steps(
            module,
            known,
            TrainerLoop(module),
            self.groups,
            self.device_mesh,
            self.root_device,
            self._loss_weight,
            self._check_saved,
            reduces_each=self._reduces_each,
            syncs_batch_norm=self._syncs_over_data_ranks(),
        )
        self._steps, self._gradients, self._first_checks = made.run, made.gradients, made.first_checks
        self._metrics = made.metrics
        if known.stages is None:
            self._guard = StageParameters(_sharded(module) if self.layout.world_size > 1 else {}, has_stages=False)
            return
        self._guard = StageParameters(known.stages.incomplete, known.names)
        self._of_run.enter_context(self._guard.watching(module.trainer))

    def _syncs_over_data_ranks(self) -> bool:
        return self._layer_sync is not None and self.layout.data_parallel_size > 1

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        reshard(self._module)
        parameters = dict(self._module.named_parameters())
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        several = self.layout.pipeline_parallel_size > 1
        with ExitStack() as inside:
            if several:
                inside.enter_context(allowing_empty_optimizers())
                gather = self.groups.gather_over_stages
                inside.enter_context(all_parameters(self._module, self._assembly.names, gather))
            super().setup_optimizers(trainer)
        self._trains = self._what_trains()
        if several:
            refuse_frozen(self._trains)
        tied = {name for tie in self._assembly.ties for name in tie.names}
        self._given = prepare(self.optimizers, parameters, self._built, tied, self.layout, self.groups)
        if finetuning_callbacks(trainer):  # which may have been restored
            add_unfrozen_groups(trainer, self._module, self.optimizers)
            self._trains = self._what_trains()

    def _what_trains(self) -> list[dict[str, bool]]:
        """Which parameters train, by name, for each stage; a collective call over the pipeline."""
        return what_trains(self._module, self.groups.gather_over_stages)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        mesh = self.device_mesh[self.layout.stage_axes]
        norms = WholeNorms(self._module, mesh, self.groups, self.root_device, self._guard)
        norms.take_over(self.precision_plugin)
        self._of_run.enter_context(norms.of_functions())
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            agree_on_overflows(scaler, self.optimizers)
        gradients, whole = self._gradients, self.precision_plugin.post_backward

        def post_backward(loss: Tensor, module: pl.LightningModule) -> Tensor:
            gradients.end_backward()
            return whole(loss, module)

        self.precision_plugin.__dict__["post_backward"] = post_backward


def _sharded(module: nn.Module) -> dict[str, nn.Module]:
    """The modules, by name, that hold shards or contain a module that does."""
    own = {inner for inner in module.modules() if any(isinstance(p, DTensor) for p in inner.parameters(recurse=False))}
    return {name: each for name, each in module.named_modules() if not own.isdisjoint(each.modules())}
