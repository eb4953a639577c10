"""``lightning_shard.plan``: what a layout of a module takes, before anybody pays for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_shard.dryrun.counting import count
from lightning_shard.dryrun.counts import Counts
from lightning_shard.dryrun.devices import Device
from lightning_shard.dryrun.devices import device as device_of
from lightning_shard.dryrun.memory import KINDS, Held, StageMemory, usable
from lightning_shard.dryrun.model import Model
from lightning_shard.dryrun.moments import stage_memories
from lightning_shard.dryrun.optimizer import OptimizerState, ask
from lightning_shard.dryrun.rates import Measured, Rates, dtype_of
from lightning_shard.dryrun.step_time import StepTime, share_text
from lightning_shard.dryrun.stored import Stored, stored
from lightning_shard.dryrun.time import Timing, model_flops
from lightning_shard.errors import ConfigurationError, LayoutError, ShardError
from lightning_shard.layout import Layout
from lightning_shard.parallel.expert import ExpertPlan
from lightning_shard.parallel.recompute import Recomputing, check_recomputing
from lightning_shard.parallel.tensor import Plan as TensorPlan
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.placement import Placement, count_text, place, range_text, short, size_text, table
from lightning_shard.pipeline.schedule import Schedule
from lightning_shard.plugin import loops
from lightning_shard.plugin.limits import generates_in_validation
from lightning_shard.plugin.placing import as_run, devices_of
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.schedules import against_parts, candidates, choose, that_fit, with_one_stage_each

_UNKNOWN = "unknown"
_COLUMNS = {kind: "weights" if kind == "parameters" else kind for kind in KINDS if kind != "batch"}
"""Kinds of memory, as the table names them."""
_IN_TWO_PARTS = (
    "between both parts of a backward a stage keeps twice what its forward kept: it is less where only the gradients of"
    " matrix products' weights come later"
)
_FROM_THE_STEP = ("activations", "received", "loss", "working")
"""Kinds that aren't known where the step wasn't counted."""


@dataclass(frozen=True)
class Run:
    """What is chosen beside the layout, and is arithmetic once a microbatch was counted.

    Attributes:
        microbatches: Of a batch; with one stage there is one.
    """

    schedule: str = "1F1B"
    microbatches: int = 1
    placement: Literal["auto", "even"] | Sequence[int] = "auto"
    held: Held = field(default_factory=Held)
    asynchronous_saving: bool = False


@dataclass(frozen=True)
class Remedy:
    """A change that would make a layout fit.

    Attributes:
        setting: As it is written in a recipe.
        peak_bytes: Of the fullest stage then.
    """

    setting: str
    peak_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a layout of a module takes; ``str()`` is a table.

    Attributes:
        layout: Axis sizes.
        run: What else was chosen.
        name: The module's class.
        model_parameters: Elements of the whole model, tied ones once.
        counts: Of one microbatch on one rank.
        placement: Blocks to stages, to ranks; ``None`` where the module has no blocks.
        schedule: Each rank's order.
        optimizer: ``None`` where it can't be known.
        stages: Memory of each pipeline rank's devices, with its stage or its stages.
        checkpoint: What a save writes.
        device_memory: Bytes of a device, where it was given.
        unknown: What isn't known, and why: the numbers leave it out.
        remedies: What would make it fit, the cheapest first; empty where it fits, or nothing that was tried does.
        time: A step on a device; ``None`` where none was named.
        choice: How the schedule was chosen among others; empty where it was named.
    """

    layout: Layout
    run: Run
    name: str
    precision: str
    device_type: str
    model_parameters: int
    counts: Counts
    placement: Placement | None
    schedule: Schedule
    optimizer: OptimizerState | None
    stages: tuple[StageMemory, ...]
    checkpoint: Stored
    device_memory: int | None = None
    unknown: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    time: StepTime | None = None
    choice: str = ""

    @property
    def peak_bytes(self) -> int:
        """Of the fullest stage's devices."""
        return max(stage.peak.total for stage in self.stages)

    @property
    def fits(self) -> bool | None:
        """Whether each device has room; ``None`` where its memory, or what it must hold, isn't known."""
        if self.device_memory is None:
            return None
        if self.peak_bytes > usable(self.device_memory):
            return False
        return None if self.unknown else True

    def to_json(self) -> dict[str, Any]:
        """For machines: numbers are bytes, where they aren't counts."""
        return {
            "module": self.name,
            "parameters": self.model_parameters,
            "layout": self.layout.sizes,
            "precision": self.precision,
            "schedule": self.schedule.name,
            "choice": self.choice or None,
            "microbatches": self.run.microbatches,
            "samples_per_microbatch": self.counts.samples,
            "tokens_per_microbatch": self.counts.tokens,
            "settings": dataclasses.asdict(self.run.held),
            "optimizers": list(self.optimizer.names) if self.optimizer is not None else None,
            "counted": self.counts.counted,
            "assumed": list(self.counts.assumed),
            "unknown": list(self.unknown),
            "device_memory": self.device_memory,
            "peak": self.peak_bytes,
            "fits": self.fits,
            "remedies": [dataclasses.asdict(remedy) for remedy in self.remedies],
            "stages": [
                {
                    "stages": list(memory.stages),
                    "ranks": [ranks.start, ranks.stop - 1],
                    "blocks": [[blocks.start, blocks.stop] for blocks in self._blocks(memory)],
                    "in_flight": list(memory.in_flight),
                    "parameters": memory.parameters,
                    "peak": memory.peak.total,
                    "peak_at": str(memory.peak),
                    "memory": dict(memory.peak.bytes),
                    "host": dict(memory.host),
                }
                for memory, ranks in zip(self.stages, self.layout.stages())
            ],
            "checkpoint": dataclasses.asdict(self.checkpoint),
            "time": self.time.to_json() if self.time is not None else None,
        }

    def __str__(self) -> str:
        lines = [*self._heading(), "", self._table(), "", *self._verdict(), *self._time(), str(self.checkpoint)]
        lines += [self.choice] if self.choice else []
        timed = self.time if self.time is not None else self.counts
        lines += [f"assumed: {text}" for text in timed.assumed]
        lines += [f"{_UNKNOWN}: {text}" for text in self.unknown]
        if self.time is not None:
            lines += [f"{_UNKNOWN} in the time: {text}" for text in self.time.unknown]
        return "\n".join(lines)

    def _blocks(self, memory: StageMemory) -> list[range]:
        return [self.placement.stages[stage].blocks for stage in memory.stages] if self.placement is not None else []

    def _heading(self) -> Iterator[str]:
        ranks = self.layout.world_size
        size = count_text(self.model_parameters).replace(" G", " B")
        devices = f"{self.device_type} device{'s' * (ranks > 1)}"
        yield f"{self.name}: {size} parameters on {ranks} {devices}, {self.layout}"
        batch = f"{self.counts.samples} sample{'s' * (self.counts.samples > 1)}"
        if self.counts.tokens != self.counts.samples:
            batch += f" ({self.counts.tokens:,} tokens)"
        held = self.run.held
        facts = [self.precision]
        if self.layout.pipeline_parallel_size > 1:
            facts += [self.schedule.name, f"{self.run.microbatches} microbatches of {batch}"]
        else:
            facts.append(f"batches of {batch}")
        if held.accumulates > 1:
            facts.append(f"accumulate_grad_batches={held.accumulates}")
        for name in ("activation_checkpointing", "cpu_offload", "reduce_each_microbatch", "reshard_after_forward"):
            if getattr(held, name) not in (None, False):
                facts.append(f"{name}={getattr(held, name)}")
        facts.append(" and ".join(self.optimizer.names) if self.optimizer is not None else "optimizer unknown")
        yield ", ".join(facts)

    def _table(self) -> str:
        several = len(self.stages) < self.schedule.stages
        names = ["stages" if several else "stage", "ranks", "blocks", "in flight"]
        header = [*names, "parameters", *_COLUMNS.values(), "peak", "at"]
        rows = []
        for memory, ranks in zip(self.stages, self.layout.stages()):
            rows.append(
                [
                    ", ".join(map(str, memory.stages)),
                    f"{ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]),
                    ", ".join(map(range_text, self._blocks(memory))),
                    " + ".join(map(str, memory.in_flight)) if several else "",
                    count_text(memory.parameters),
                    *(self._cell(kind, memory.peak.bytes[kind]) for kind in _COLUMNS),
                    size_text(memory.peak.total) + (" +?" if self.unknown else ""),
                    short(_last_names(str(memory.peak)), 48),
                ]
            )
        return table(header, rows, to_the_right=("parameters", *_COLUMNS.values(), "peak"))

    def _cell(self, kind: str, nbytes: int) -> str:
        is_unknown = not self.counts.counted and kind in _FROM_THE_STEP
        if is_unknown or (kind == "optimizer" and self.optimizer is None):
            return _UNKNOWN
        return size_text(nbytes) if nbytes else ""

    def _time(self) -> Iterator[str]:
        if self.time is None:
            return
        yield str(self.time)
        yield f"  the busiest device: {share_text(self.time)}"
        if self.time.sent:
            sent = ", ".join(f"{axis} {size_text(nbytes)}" for axis, nbytes in self.time.sent.items())
            yield f"  a device sends in a step: {sent}"

    def _verdict(self) -> Iterator[str]:
        peak = size_text(self.peak_bytes)
        stages = max(self.stages, key=lambda stage: stage.peak.total).stages
        fullest = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        if self.device_memory is None:
            yield f"a device of {fullest} needs most: {peak}, and what its driver and allocator take beside"
        else:
            room = f"tensors can have {size_text(usable(self.device_memory))} of its {size_text(self.device_memory)}"
            if self.fits:
                yield f"fits: a device of {fullest} needs most, {peak}; {room}"
            elif self.fits is None:
                yield f"whether it fits is unknown: a device of {fullest} needs at least {peak}; {room}"
            else:
                yield f"does not fit: a device of {fullest} needs {peak}; {room}"
                for remedy in self.remedies:
                    yield f"  {remedy.setting} would: {size_text(remedy.peak_bytes)}"
                if not self.remedies:
                    yield "  nothing that was tried would: use more devices, or a smaller batch or model"
        host = max(sum(stage.host.values()) for stage in self.stages)
        if host:
            yield f"in the host's memory: {size_text(host)} for each device"


def _last_names(text: str) -> str:
    """``layers.3`` for ``model.decoder.layers.3``."""
    return re.sub(r"(?:\w+\.)+(\w+\.\w+)", r"\1", text)


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
    measured: Measured | None = None,
) -> Plan:
    """What a layout takes: memory of each stage's devices, and what a checkpoint is; no device and no memory is used.

    Args:
        module: A LightningModule, which stays as it is, or a function that builds one; it is called on meta.
        batch: What one data-parallel rank reads for a step, of any values: their shapes count. On meta too.
        layout: A :class:`~lightning_shard.layout.Layout`, or axis sizes by the names of the strategy's arguments.
        precision: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        asynchronous_saving: Whether checkpoints are copied and written by a thread.
        device_memory: Bytes of each device, to say whether it fits and what would make it fit.
        device_type: ``"cuda"``: with the fused kernels that GPUs have; ``"cpu"``.
        device: A profile to time a step on: its name, such as ``"h100"``, the path of a YAML file, or a mapping. Says
            its memory too, where ``device_memory`` doesn't.
        measured: What the module's parts took on a device at hand (``dryrun.calibrate``), instead of its peaks.

    The others are those of :class:`~lightning_shard.HybridShardStrategy`, and mean the same.

    Raises:
        ConfigurationError: What a run would refuse too; or the module can't be built without memory.
    """
    check_recomputing(activation_checkpointing)
    chosen = _layout(layout)
    settings = Settings(
        placement,
        pipeline_blocks,
        tensor_parallel_plan,
        expert_parallel_plan,
        activation_checkpointing=activation_checkpointing,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
        gathered_dtype=loops.GATHERED.get(precision),
    )
    stages = chosen.pipeline_parallel_size
    model = Model.of(module, batch, settings, stages=stages, precision=precision, device_type=device_type)
    held = Held(
        activation_checkpointing,
        cpu_offload and device_type != "cpu",  # there the host's memory is the device's
        reduce_each_microbatch,
        reshard_after_forward,
        accumulate_grad_batches,
        sends_stay=device_type == "cpu",
    )
    number = candidates(schedule, stages, microbatches, placement)[0].microbatches if stages > 1 else 1
    run = Run(schedule, number, placement, held, asynchronous_saving)
    profile = None if device is None else device_of(device)
    rates = None if profile is None else Rates(profile, dtype_of(precision), measured=measured)
    if profile is not None and device_memory is None:
        device_memory = profile.memory
    planner = Planner(model, rates)
    made = planner.plan(chosen, run, device_memory)
    return replace(made, remedies=tuple(planner.remedies(made))) if made.fits is False else made


class Planner:
    """Plans of one model: each microbatch is counted once.

    Args:
        model: The module and its batch.
        rates: Of the device that steps are timed on.
    """

    def __init__(self, model: Model, rates: Rates | None = None) -> None:
        self.model = model
        self.rates = rates
        self.optimizer, self._optimizer_reason = ask(model)
        self._counts: dict[tuple[int, int, int], Counts] = {}

    def counts(self, layout: Layout, microbatches: int) -> Counts:
        """Of one of so many microbatches.

        Raises:
            ConfigurationError: The batch can't be cut so, or the module.
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
            self._counts[key] = count(
                self.model, tensor_parallel_size=sizes[0], expert_parallel_size=sizes[1], samples=key[2]
            )
        return self._counts[key]

    def placed(self, layout: Layout, run: Run, order: Schedule) -> Placement | None:
        """Blocks to stages, as a run places them."""
        if self.model.cost is None:
            return None
        policy = run.placement if layout.pipeline_parallel_size > 1 else "even"
        cost = as_run(self.model.cost, run.held.activation_checkpointing)
        devices, ranks = devices_of(layout, self.model.device_type), layout.stages()
        holders = [order.rank_of[stage] for stage in range(order.stages)]
        return place(
            cost,
            order.stages,
            policy,
            devices=[devices[rank] for rank in holders],
            ranks=[ranks[rank] for rank in holders],
        )

    def plan(self, layout: Layout, run: Run, device_memory: int | None = None) -> Plan:
        """One plan.

        Raises:
            ConfigurationError: The module can't be laid out so.
        """
        order, choice = self._order(layout, run)
        counts = self.counts(layout, run.microbatches)
        if order.splits_backwards:
            counts = replace(counts, assumed=(*counts.assumed, _IN_TWO_PARTS))
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
            placement = Placement(
                tuple(
                    replace(stage, memory=stages[order.rank_of[index]].peak.total)
                    for index, stage in enumerate(placement.stages)
                )
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
        """The schedule that a run would take, and how that was chosen."""
        orders = candidates(run.schedule, layout.pipeline_parallel_size, run.microbatches, run.placement)
        if generates_in_validation(self.model.module):  # as a fit with validation
            orders = with_one_stage_each(orders) or orders
        blocks = len(self.model.blocks.names) if self.model.blocks is not None else 1
        fitting = that_fit(orders, blocks, run.placement)

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
            return None  # estimated operations are of another microbatch
        whole = counts
        if layout.tensor_parallel_size > 1 or layout.expert_parallel_size > 1:
            whole = self.counts(replace(layout, tensor_parallel_size=1, expert_parallel_size=1), run.microbatches)
        timing = Timing.of(counts, layout, blocks, order, run.held, self.rates, self.optimizer)
        return timing.simulated(model_flops(whole) if whole.counted else None)

    def remedies(self, made: Plan) -> Iterator[Remedy]:
        """What makes a plan fit that doesn't, the cheapest first."""
        for setting, layout, run in _changes(made):
            try:
                changed = self.plan(layout, run, made.device_memory)
            except ShardError:
                continue  # the batch or the module can't be cut so
            if changed.fits:
                yield Remedy(setting, changed.peak_bytes)
                if layout == made.layout:
                    return  # what costs more time isn't needed


def _changes(made: Plan) -> Iterator[tuple[str, Layout, Run]]:
    """What to try: from what costs nothing to what costs most."""
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
    """Of as many ranks, the model over twice as many."""
    if layout.data_parallel_size % 2 == 0 and layout.data_parallel_replicas == layout.expert_parallel_size == 1:
        half = layout.data_parallel_size // 2
        yield replace(layout, data_parallel_size=half, tensor_parallel_size=2 * layout.tensor_parallel_size)
        yield replace(layout, data_parallel_size=half, pipeline_parallel_size=2 * layout.pipeline_parallel_size)
    if layout.data_parallel_replicas > 1:
        yield replace(layout, data_parallel_replicas=1)


def _layout(given: Layout | Mapping[str, int]) -> Layout:
    size = given.context_parallel_size if isinstance(given, Layout) else given.get("context_parallel_size", 1)
    if size != 1:
        raise LayoutError(
            f"context_parallel_size ({size!r}): what sequences over ranks take isn't counted yet: plan with 1, whose"
            " blocks' activations are those of all context ranks together."
        )
    if isinstance(given, Layout):
        return given
    sizes = dict(given)
    data = sizes.pop("data_parallel_size", 1)
    world = data * sizes.get("pipeline_parallel_size", 1) * sizes.get("tensor_parallel_size", 1)
    return Layout.resolve(world, data_parallel_size=data, **sizes)
