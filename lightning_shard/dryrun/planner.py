"""Makes plans of one model: counts each kind of microbatch once, and computes each layout from the counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_shard import tree
from lightning_shard.dryrun.counting.count import count_each, count_two_parts
from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.optimizer import ask
from lightning_shard.dryrun.memory.stored import stored
from lightning_shard.dryrun.planned import Plan, Remedy, Run
from lightning_shard.dryrun.timing.layout import StepTime, Timing, model_flops
from lightning_shard.dryrun.timing.rates import Rates
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.layout import Layout
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.placing import as_run, devices_of
from lightning_shard.plugin.steps.schedule_choice import against_parts, candidates, choose, fitting_schedules


class Planner:
    """Makes plans of one model, and caches the counts of microbatches; with times, if it knows a device's rates."""

    def __init__(self, model: Model, rates: Rates | None = None) -> None:
        self.model, self.rates = model, rates
        self.optimizer, self._optimizer_reason = ask(model)
        self._counts: dict[tuple[int, int, int], Counts] = {}

    def counts(self, layout: Layout, microbatches: int, *, in_two_parts: bool = False) -> Counts:
        """The counts of one microbatch, if the batch is cut into so many; if asked, with those of split backwards.

        Raises:
            ConfigurationError: The batch or the module can't be cut that way.
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
        devices, ranks = devices_of(layout, self.model.device_type), layout.stages()
        holders = [order.rank_of[stage] for stage in range(order.stages)]
        own, of = [devices[rank] for rank in holders], [ranks[rank] for rank in holders]
        return place(cost, order.stages, policy, devices=own, ranks=of)

    def plan(self, layout: Layout, run: Run, device_memory: int | None = None) -> Plan:
        """Make the plan of a layout.

        Raises:
            ConfigurationError: The module can't be laid out that way.
        """
        order, choice = self._order(layout, run)
        counts = self.counts(layout, run.microbatches, in_two_parts=order.splits_backwards)
        placement = self.placed(layout, run, order)
        blocks = [stage.blocks for stage in placement.stages] if placement is not None else [range(0)]
        stages = stage_memories(counts, layout, blocks, order, run.held, self.optimizer, copies=run.asynchronous_saving)
        unknown = []
        if not counts.counted:
            what = "memory of activations" + (", and time" if self.rates is not None else "")
            unknown.append(f"{what}: the step can't be run on fake tensors ({counts.reason})")
        if self.optimizer is None:
            unknown.append(f"the optimizer's state: it can't be asked for it ({self._optimizer_reason})")
        if placement is not None and not unknown:
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
            tuple(unknown),
            time=self._timed(counts, layout, blocks, order, run),
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

        settings = dataclasses.asdict(run.held)
        choice = choose(fitting, placed, settings, has_data_ranks=layout.data_parallel_size > 1)
        order = fitting[0] if choice is None else choice.schedule
        if order.splits_backwards and against_parts(settings):
            order = order.with_whole_backwards()
        return order, "" if choice is None else str(choice)

    def _timed(
        self, counts: Counts, layout: Layout, blocks: Sequence[range], order: Schedule, run: Run
    ) -> StepTime | None:
        if self.rates is None or not counts.counted:
            return None  # operations estimated from parameters are of another microbatch
        whole = counts
        if layout.tensor_parallel_size > 1 or layout.expert_parallel_size > 1:
            whole = self.counts(replace(layout, tensor_parallel_size=1, expert_parallel_size=1), run.microbatches)
        timing = Timing.of(counts, layout, blocks, order, run.held, self.rates, self.optimizer)
        return timing.simulated(model_flops(whole) if whole.counted else None)


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
