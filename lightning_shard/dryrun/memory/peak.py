"""What a stage and a rank hold: parts, FSDP2 units and their bytes. Pure arithmetic on counts.

``moments.py`` computes what a rank holds at each moment of a step. Not counted: memory of the device's driver, the
allocator's fragmentation, and communicators; see ``RESERVED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from lightning_shard.dryrun.counting.counts import Counts, ParameterCount, PartCount
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing, chosen
from lightning_shard.pipeline.schedules.schedule import Action, Schedule

RESERVED = 0.06
"""Fraction of a device's memory that is left to its driver, communicators and the allocator's fragmentation."""
KINDS = (
    *("parameters", "buffers", "optimizer", "gradients", "gathered", "activations", "received", "loss", "working"),
    "batch",
)
_WHOLE = (torch.float32, torch.float64)
"""Dtypes of parameters that a single rank holds without FSDP2."""


def usable(device_memory: int) -> int:
    """Bytes of a device's memory that are available to tensors."""
    return int(device_memory * (1 - RESERVED))


@dataclass(frozen=True)
class Held:
    """The settings that determine what is held; see ``HybridShardStrategy`` for those that aren't explained."""

    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    reduce_each_microbatch: bool = False
    reshard_after_forward: bool | None = None
    accumulates: int = 1  # batches per optimizer step (``accumulate_grad_batches``)
    sends_stay: bool = False
    """Whether sent tensors live until the end of the step, as with gloo; otherwise only the last one does."""


@dataclass(frozen=True)
class Moment:
    """The most that a rank's device holds while one part of one action runs."""

    action: Action | None  # ``None`` for the optimizer's step
    part: str  # the part's name
    bytes: Mapping[str, int]  # by kind, see ``KINDS``

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        if self.action is None:
            return "optimizer step"
        more = {"I": " for inputs", "W": " for weights"}.get(self.action.kind, "")
        what = "forward" if self.action.kind == "F" else f"backward{more}"
        return f"{what} of {self.part}, microbatch {self.action.microbatch}"


@dataclass(frozen=True)
class StageMemory:
    """The memory of one pipeline rank; with uneven shards, of the device that holds most."""

    stages: tuple[int, ...]  # in the network's order; one with most schedules
    in_flight: tuple[int, ...]  # for each of its stages, the largest number of microbatches in flight
    peak: Moment  # at which the device holds most
    host: Mapping[str, int]  # bytes in host memory, by kind: what is offloaded, and an asynchronous save's copy
    moments: tuple[Moment, ...]  # in the order of a step
    parameters: int  # elements of parameters that a rank holds


class Unit:
    """An FSDP2 unit: the parameters that are gathered for a block. It has many attributes: sizes, in bytes.

    Args:
        shards: Over how many ranks the parameters are sharded.
        expert_shards: The same for experts' parameters.
        is_sharded: Whether FSDP2 is used; without it nothing is gathered, and no gradient reduced.

    Attributes:
        padded: Each parameter with the number of elements of a rank's (padded) shard.
        whole: Each parameter that is gathered, with the number of elements of all ranks' padded shards.
        held, reduced: Shards of parameters; of gradients.
        gathered: Whole parameters, padded.
        flat: The buffer of the unit's all-gather; none for parameters on a single rank, which are copied.
        reduces_in: The dtype in which gradients are accumulated and reduced, if it isn't their own.
        accumulated: Gradients of whole parameters, in the dtype of accumulation.
        fresh: The same in the dtype in which a backward creates them.
        reducing: The buffer of a reduce-scatter: whole gradients, padded.
    """

    def __init__(self, parameters: Sequence[ParameterCount], shards: int, expert_shards: int, is_sharded: bool) -> None:
        self.parameters, self.is_sharded, self._sizes = parameters, is_sharded, (shards, expert_shards, is_sharded)
        of = {False: shards, True: expert_shards}
        self.padded = [(p, shard_numel(p, of[p.is_expert])) for p in parameters]
        self.whole = [(p, numel * of[p.is_expert]) for p, numel in self.padded]
        trained = [(p, numel) for p, numel in self.whole if p.requires_grad]
        halves = any(p.gathers_in in (torch.bfloat16, torch.float16) for p in parameters)
        self.reduces_in = torch.float32 if halves else None
        self.held = sum(numel * p.dtype.itemsize for p, numel in self.padded)
        self.reduced = sum(numel * p.dtype.itemsize for p, numel in self.padded if p.requires_grad)
        self.gathered = is_sharded * sum(numel * p.gathers_in.itemsize for p, numel in self.whole)
        self.flat = sum(numel * p.gathers_in.itemsize for p, numel in self.whole if of[p.is_expert] > 1)
        self.accumulated = sum(p.numel * self.gradient(p).itemsize for p, _ in trained)
        self.fresh = sum(p.gathered_bytes for p, _ in trained)
        self.reducing = is_sharded * sum(numel * self.gradient(p).itemsize for p, numel in trained)

    def of(self, parameters: Iterable[ParameterCount]) -> Unit:
        """A unit of other parameters, sharded alike."""
        return Unit([*parameters], *self._sizes)

    @cached_property
    def gathered_apart(self) -> tuple[Unit, ...]:
        """The units of a block and of its sharded experts, which FSDP2 gathers separately, in the forward's order."""
        kinds = [[p for p in self.parameters if p.is_expert is dealt] for dealt in (False, True)]
        return tuple(map(self.of, kinds)) if all(kinds) else (self,)

    @property
    def is_of_experts(self) -> bool:
        """Whether one of :attr:`gathered_apart` has the experts."""
        return any(p.is_expert for p in self.parameters)

    def gradient(self, parameter: ParameterCount) -> torch.dtype:
        return self.reduces_in or parameter.dtype


def shard_numel(parameter: ParameterCount, parts: int) -> int:
    """Elements of the largest of ``parts`` shards: dim 0 is cut as by ``torch.chunk``, and padded to the largest shard.

    Experts are cut along the first dim that divides evenly.
    """
    sizes = parameter.local_shape
    if not sizes or not parameter.numel:
        return parameter.numel
    dim = next((d for d, size in enumerate(sizes) if size % parts == 0), 0) if parameter.is_expert else 0
    return parameter.numel // sizes[dim] * -(-sizes[dim] // parts)


class _Holder:
    """What holds units' shards: a stage, or a rank; ``shards`` as :attr:`Unit.padded`."""

    def __init__(self, units: Sequence[Unit], optimizer: OptimizerState) -> None:
        self.every_unit, self.optimizer = tuple(units), optimizer
        self.shards = [pair for unit in units for pair in unit.padded]
        self.state_bytes = sum(optimizer.bytes(p, numel) for p, numel in self.shards)
        self.held_bytes = sum(unit.held for unit in units)
        self.reduced_bytes = sum(unit.reduced for unit in units)


class Stage(_Holder):
    """One stage's parts and FSDP2 units.

    Attributes:
        parts: What the stage runs, in order.
        costs: Each part's cost, in the way that it is run (plain or recomputed).
        units: The units of its blocks, by name.
        root: The unit of all other parameters.
        of_loss: The names of what runs after the last block.
    """

    def __init__(self, counts: Counts, layout: Layout, blocks: range, held: Held, optimizer: OptimizerState) -> None:
        self.counts, self.held = counts, held
        self.layout, self.blocks = layout, blocks
        self.parts = counts.of_stage(blocks)
        recomputed = {counts.blocks[place].name for place in chosen(len(counts.blocks), held.activation_checkpointing)}
        selective = held.activation_checkpointing == "selective"
        self.costs = [
            (part.selective if selective else part.recomputed) if part.name in recomputed else part.plain
            for part in self.parts
        ]
        self.units, self.root = self._make_units()
        self.of_loss = {part.name for place, part in counts.parts if place == len(counts.blocks)} | {counts.loss.name}
        super().__init__((*self.units.values(), self.root), optimizer)

    def _make_units(self) -> tuple[dict[str, Unit], Unit]:
        shards = self.layout.shard_size
        sizes = shards, shards // self.layout.expert_parallel_size, self._is_sharded()
        named = {part.name: part for part in self.parts}
        uses = Counter(name for part in named.values() for name in {p.name for p in part.parameters})
        elsewhere = self.counts.uses
        block_names = {block.name for block in self.counts.blocks[self.blocks.start : self.blocks.stop]}
        units: dict[str, Unit] = {}
        root: dict[str, ParameterCount] = {}
        for name, part in named.items():
            own = {p.name: p for p in part.parameters}
            if name not in block_names or any(uses[each] > 1 or elsewhere[each] > 1 for each in own):
                root |= own
                continue
            if any(p.gathered_dtype is not None for p in own.values()):  # FSDP2 casts these, and leaves out the others
                root |= {each: p for each, p in own.items() if p.gathered_dtype is None and not p.is_expert}
            units[name] = Unit([p for p in own.values() if p.name not in root], *sizes)
        return units, Unit([*root.values()], *sizes)

    def _is_sharded(self) -> bool:
        """Whether FSDP2 is applied; the same rule as in :mod:`lightning_shard.parallel.fsdp.shard`."""
        layout = self.layout
        if layout.data_parallel_size > 1 or self.held.cpu_offload:
            return True
        parameters = [p for part in self.counts.of_stage(range(len(self.counts.blocks))) for p in part.parameters]
        return any(p.gathered_dtype is not None or p.dtype not in _WHOLE for p in parameters)

    @property
    def keeps_gathered(self) -> bool:
        """Whether blocks stay gathered for the whole step."""
        reshards = self.held.reshard_after_forward
        return self.layout.pipeline_parallel_size > 1 if reshards is None else not reshards

    def units_of(self, part: PartCount) -> tuple[Unit, ...]:
        """The units that are gathered for a part, without the root, in the forward's order."""
        unit = self.units.get(part.name)
        return () if unit is None else unit.gathered_apart

    @property
    def received(self) -> int:
        """Bytes that a microbatch's forward receives from the previous stage."""
        return self.counts.blocks[self.blocks.start - 1].output if self.blocks.start else 0

    @property
    def handed_on(self) -> int:
        """Bytes that a microbatch's forward sends to the next stage."""
        return 0 if self.blocks.stop == len(self.counts.blocks) else self.counts.blocks[self.blocks.stop - 1].output


class Rank(_Holder):
    """One pipeline rank, with its stages; it is given at least its own, by number.

    Attributes:
        stages: This rank's stages by number.
        row: This rank's actions, in order.
        splits: Whether the schedule splits any backward.
        brought: By stage, bytes that a microbatch's forward receives from another rank.
        taken: By stage, bytes that a microbatch's forward sends to another rank.
        units: The units of all stages' blocks, with their experts' units.
        root: The root unit of all stages together; a parameter that several stages have counts once.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, rank: int) -> None:
        holder = schedule.rank_of
        self.stages = {index: stages[index] for index in schedule.stages_of(rank)}
        self.row = schedule.rows[rank]
        self.splits = schedule.splits_backwards
        self.brought = {i: stage.received * (holder.get(i - 1) != rank) for i, stage in self.stages.items()}
        self.taken = {i: stage.handed_on * (holder.get(i + 1) != rank) for i, stage in self.stages.items()}
        first, *others = self.stages.values()
        self.held = first.held
        of_blocks = (unit for stage in self.stages.values() for unit in stage.units.values())
        self.units = [unit for of_block in of_blocks for unit in of_block.gathered_apart]
        parameters = {p.name: p for stage in self.stages.values() for p in stage.root.parameters}
        self.root = first.root.of(parameters.values()) if others else first.root
        super().__init__((*self.units, self.root), first.optimizer)
