"""``lightning_shard.plan``: estimates memory, time and checkpoint size of a layout, without devices.

Each kind of microbatch is counted once; each layout is computed from the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_shard import lightning_private, tree
from lightning_shard.arguments import check_count
from lightning_shard.dryrun.counting.count import count_each, count_two_parts
from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.optimizer import ask
from lightning_shard.dryrun.memory.peak import Held, Stage
from lightning_shard.dryrun.memory.stored import stored
from lightning_shard.dryrun.planned import Plan, Remedy, Run
from lightning_shard.dryrun.timing.devices import Device, Rates, dtype_of
from lightning_shard.dryrun.timing.devices import device as device_of
from lightning_shard.dryrun.timing.layout import StepTime, Timing, model_flops
from lightning_shard.errors import ConfigurationError, LayoutError, ShardError
from lightning_shard.layout import SIZES, Layout, check_sizes
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.tensor.plan import Plan as TensorPlan
from lightning_shard.pipeline.placement import Placement
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.placing import as_run, placed_on
from lightning_shard.plugin.settings import Settings, check_switches
from lightning_shard.plugin.steps.schedule_choice import against_parts, candidates, choose, fitting_schedules


def plan(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    layout: Layout | Mapping[str, int],
    microbatches: int | None = None,
    schedule: str = "1F1B",
    placement: Literal["auto", "even"] | Sequence[int] = "auto",
    pipeline_blocks: str | Sequence[str] | None = None,
    tensor_parallel_plan: TensorPlan | None = None,
    expert_parallel_plan: ExpertPlan | None = None,
    activation_checkpointing: Recomputing = None,
    cpu_offload: bool = False,
    reduce_each_microbatch: bool = False,
    reshard_after_forward: bool | None = None,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    asynchronous_saving: bool = False,
    device_memory: int | None = None,
    device_type: str = "cuda",
    device: str | Mapping[str, Any] | Device | None = None,
) -> Plan:
    """Estimate a layout: memory of each stage's devices, checkpoint size and, for a device profile, time per step.

    Uses no device, and no memory for the model.

    Args:
        module: A LightningModule, which isn't modified; or a function that builds one, which is called on meta.
        batch: What one data-parallel rank reads for a step. Only shapes count, so it may be on meta, too.
        layout: A :class:`~lightning_shard.layout.Layout`, or axis sizes by the names of the strategy's arguments.
        precision: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        asynchronous_saving: Whether checkpoints are copied to host memory and written by a thread.
        device_memory: Bytes of each device, to determine whether the layout fits, and what would make it fit.
        device_type: ``"cuda"``: with the fused kernels of GPUs; or ``"cpu"``.
        device: A device profile to estimate the time of a step: its name, such as ``"h100"``; the path of a YAML file;
            or a mapping. Its memory is the default of ``device_memory``.

    The other arguments are those of :class:`~lightning_shard.HybridShardStrategy`.

    Raises:
        ConfigurationError: A run would refuse the settings, too; or the module can't be built, or its step and its
            optimizers can't be run, without memory and values.
    """
    accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches)
    if device_memory is not None:
        device_memory = check_count("device_memory", device_memory)
    check_switches(reduce_each_microbatch=reduce_each_microbatch, asynchronous_saving=asynchronous_saving)
    precision = lightning_private.named_precision(precision)
    chosen = _layout_of(layout)
    blocks_and_plans = pipeline_blocks, tensor_parallel_plan, expert_parallel_plan
    settings = Settings(
        placement,
        *blocks_and_plans,
        activation_checkpointing=activation_checkpointing,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
    )
    stages = chosen.pipeline_parallel_size
    model = Model.of(module, batch, settings, stages=stages, precision=precision, device_type=device_type)
    held = Held(
        activation_checkpointing,
        cpu_offload and device_type != "cpu",  # on the CPU, host memory is device memory
        reduce_each_microbatch,
        reshard_after_forward,
        accumulate_grad_batches,
        sends_stay=device_type == "cpu",
    )
    number = candidates(schedule, stages, microbatches, placement)[0].microbatches if stages > 1 else 1
    run = Run(schedule, number, placement, held, asynchronous_saving)
    rates = None if device is None else Rates(device_of(device), dtype_of(precision))
    if rates is not None and held.cpu_offload:
        raise ConfigurationError(
            "cpu_offload=True isn't timed, since an optimizer's step on the host isn't known: leave device out, and"
            " pass device_memory, to plan the memory alone."
        )
    if rates is not None and device_memory is None:
        device_memory = rates.device.memory
    planner = Planner(model, rates)
    made = planner.plan(chosen, run, device_memory)
    return replace(made, remedies=tuple(remedies(planner, made))) if made.fits is False else made


def _layout_of(given: Any) -> Layout:
    """The layout to plan for; axes that aren't given have size 1."""
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in SIZES]:
            raise LayoutError(f"layout has {unknown[0]!r}, which is none of {', '.join(SIZES)}: leave it out.")
        if given.get("data_parallel_size") == "auto":
            raise LayoutError(
                'data_parallel_size ("auto"): how many ranks are left isn\'t known to a plan: give a number.'
            )
        check_sizes(**given)
        given = Layout(**given)
    if not isinstance(given, Layout):
        raise LayoutError(
            f"layout={given!r} must be a Layout, or the sizes of its axes by name, such as"
            ' {"pipeline_parallel_size": 4, "data_parallel_size": 2}.'
        )
    if given.context_parallel_size != 1:
        raise LayoutError(
            f"context_parallel_size ({given.context_parallel_size!r}): plan() doesn't support it yet: plan with 1; the"
            " activations of its blocks are then those of all context ranks together."
        )
    return given


class Planner:
    """Makes plans of one model, and caches the counts of microbatches; with times, if it knows a device's rates."""

    def __init__(self, model: Model, rates: Rates | None = None) -> None:
        self.model, self.rates = model, rates
        self.optimizer = ask(model)
        self._counts: dict[tuple[int, int, int], Counts] = {}

    def counts(self, layout: Layout, microbatches: int, *, in_two_parts: bool = False) -> Counts:
        """The counts of one microbatch, if the batch is cut into so many; if asked, with those of split backwards.

        Raises:
            ConfigurationError: The batch or the module can't be cut that way, or counted then.
        """
        samples = tree.batch_size(self.model.batch)
        if samples % microbatches:
            raise ConfigurationError(
                f"A batch of {samples} samples can't be cut into {microbatches} equal microbatches: use a batch size"
                f" that is a multiple of {microbatches}, or set microbatches to a divisor of {samples}."
            )
        sizes = layout.tensor_parallel_size, layout.expert_parallel_size
        key = (*sizes, samples // microbatches)
        if key not in self._counts:
            (self._counts[key],) = count_each(self.model, *sizes, [key[2]])
        if in_two_parts:
            self._counts[key] = count_two_parts(self.model, self._counts[key])
        return self._counts[key]

    def placed(self, layout: Layout, run: Run, order: Schedule) -> Placement | None:
        """The placement of blocks on stages that a run would use; None if the module has no blocks."""
        if self.model.cost is None:
            return None
        policy = run.placement if layout.pipeline_parallel_size > 1 else "even"
        cost = as_run(self.model.cost, run.held.activation_checkpointing)
        return placed_on(order, cost, policy, layout, self.model.device_type)

    def plan(self, layout: Layout, run: Run, device_memory: int | None = None) -> Plan:
        """Make the plan of a layout.

        Raises:
            ConfigurationError: The module can't be laid out that way.
        """
        order, choice = self._order(layout, run)
        counts = self.counts(layout, run.microbatches, in_two_parts=order.splits_backwards)
        placement = self.placed(layout, run, order)
        blocks = [stage.blocks for stage in placement.stages] if placement is not None else [range(0)]
        made = [Stage(counts, layout, own, run.held, self.optimizer) for own in blocks]
        stages = stage_memories(made, order, copies=run.asynchronous_saving)
        if placement is not None:
            peaks = [stages[order.rank_of[stage]].peak.total for stage in range(order.stages)]
            placement = Placement(
                tuple(replace(stage, memory=peak) for stage, peak in zip(placement.stages, peaks, strict=True))
            )
        return Plan(
            layout,
            run,
            type(self.model.module).__name__,
            self.model.precision,
            self.model.device_type,
            sum(parameter.numel() for parameter in self.model.module.parameters()),
            counts,
            placement,
            order,
            self.optimizer,
            stages,
            stored(counts, layout, [[blocks[stage] for stage in memory.stages] for memory in stages], self.optimizer),
            device_memory,
            time=self._timed(made, order, run),
            choice=choice,
        )

    def _order(self, layout: Layout, run: Run) -> tuple[Schedule, str]:
        """The schedule that a run would use, and a text of how it was chosen."""
        orders = candidates(run.schedule, layout.pipeline_parallel_size, run.microbatches, run.placement)
        blocks = len(self.model.blocks.names) if self.model.blocks is not None else 1
        fitting = fitting_schedules(orders, blocks, run.placement)

        def placed(order: Schedule) -> Placement:
            placement = self.placed(layout, run, order)
            assert placement is not None, "a pipeline has blocks"
            return placement

        settings = vars(run.held)
        choice = choose(fitting, placed, settings, has_data_ranks=layout.data_parallel_size > 1)
        order = fitting[0] if choice is None else choice.schedule
        if order.splits_backwards and against_parts(settings):
            order = order.with_whole_backwards()
        return order, "" if choice is None else str(choice)

    def _timed(self, stages: Sequence[Stage], order: Schedule, run: Run) -> StepTime | None:
        if self.rates is None or run.held.cpu_offload:
            return None
        whole, layout = stages[0].counts, stages[0].layout
        if layout.tensor_parallel_size > 1 or layout.expert_parallel_size > 1:
            whole = self.counts(replace(layout, tensor_parallel_size=1, expert_parallel_size=1), run.microbatches)
        return Timing.of(stages, order, self.rates).simulated(model_flops(whole))


def remedies(planner: Planner, made: Plan) -> Iterator[Remedy]:
    """Yield the cheapest change of a setting that makes a plan fit, if there is one."""
    for setting, run in _changes(made):
        try:
            changed = planner.plan(made.layout, run, made.device_memory)
        except ShardError:
            continue  # the batch or the module can't be cut that way
        if changed.fits:
            yield Remedy(setting, changed.peak_bytes)
            return


def _changes(made: Plan) -> Iterator[tuple[str, Run]]:
    """The changes to try, from those that cost nothing to those that cost most."""
    layout, run, held = made.layout, made.run, made.run.held
    if layout.pipeline_parallel_size > 1:
        for times in (2, 4, 8):
            more = replace(run, microbatches=times * run.microbatches)
            yield f"microbatches={more.microbatches}", more
    whole: dict[str, Any] = {"activation_checkpointing": True}
    settings: list[dict[str, Any]] = []
    if not held.activation_checkpointing:
        settings += [{"activation_checkpointing": "selective"}, whole]
    if layout.pipeline_parallel_size > 1 and not held.reshard_after_forward and layout.shard_size > 1:
        again = {"reshard_after_forward": True}
        each = {"reduce_each_microbatch": True, **again}
        settings += [again, {**whole, **again}, each, {**whole, **each}]
    if not held.cpu_offload:
        settings += [{"cpu_offload": True}, {**whole, "cpu_offload": True}]
    for changed in settings:
        text = " ".join(f"{name}={value}" for name, value in changed.items())
        yield text, replace(run, held=replace(held, **changed))
