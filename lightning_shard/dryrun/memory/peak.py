"""What a stage holds: its parts, and its parameters in the units that FSDP2 gathers. Pure arithmetic on counts.

What its ranks hold at each moment of a step is in ``moments.py``. Not counted are what a device's driver, its
allocator's fragments and communicators take: see ``RESERVED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lightning_shard.dryrun.counting.counts import Counts, ParameterCount, PartCount
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing, chosen
from lightning_shard.pipeline.schedules.schedule import Action, Schedule

RESERVED = 0.06
"""Of a device's memory: what is left to its driver, communicators and the allocator's fragments."""
KINDS = (
    *("parameters", "buffers", "optimizer", "gradients", "gathered", "activations", "received", "loss", "working"),
    "batch",
)
_KINDS = {"F": "forward", "B": "backward", "I": "inputs' backward", "W": "weights' backward"}
_WHOLE = (torch.float32, torch.float64)
"""Types of parameters that a single rank holds as they are, without FSDP2."""


def usable(device_memory: int) -> int:
    """Bytes that tensors can have of a device's memory."""
    return int(device_memory * (1 - RESERVED))


@dataclass(frozen=True)
class Held:
    """Settings that decide what is held.

    Attributes:
        accumulates: Batches for an optimizer step (``accumulate_grad_batches``).
        sends_stay: Whether what was sent to another stage lives until the end of the step, as with gloo; else only the
            last of it does.
    """

    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    reduce_each_microbatch: bool = False
    reshard_after_forward: bool | None = None
    accumulates: int = 1
    sends_stay: bool = False


@dataclass(frozen=True)
class Moment:
    """What a rank's device holds at most while one part of one action runs; bytes, by kind.

    Attributes:
        action: ``None`` for the optimizer's step.
        part: The part's name.
    """

    action: Action | None
    part: str
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        if self.action is None:
            return "optimizer step"
        what = {"F": "forward", "I": "backward for inputs", "W": "backward for weights"}.get(
            self.action.kind, "backward"
        )
        return f"{what} of {self.part}, microbatch {self.action.microbatch}"


@dataclass(frozen=True)
class StageMemory:
    """Of a rank with its stage, or its stages: the one that holds most, where shards differ.

    Attributes:
        stages: What it has, in the order of the network: most schedules give a rank one.
        in_flight: The most microbatches that it keeps something of at a time, for each of its stages.
        peak: The moment at which its device holds most.
        host: Bytes in the host's memory, by kind: what is offloaded, and an asynchronous save's copy.
        moments: In the order of a step.
        parameters: Elements that a rank holds.
    """

    stages: tuple[int, ...]
    in_flight: tuple[int, ...]
    peak: Moment
    host: Mapping[str, int]
    moments: tuple[Moment, ...]
    parameters: int


@dataclass
class Unit:
    """What FSDP2 gathers for a block; bytes. Where nothing is sharded, nothing is gathered, and no gradient reduced."""

    parameters: list[ParameterCount] = field(default_factory=list)
    shards: int = 1
    expert_shards: int = 1
    is_sharded: bool = True

    @cached_property
    def gathered_apart(self) -> tuple[Unit, ...]:
        """A block, and the experts in it that are dealt to ranks: in the order of a forward."""
        kinds = [[p for p in self.parameters if p.is_expert is dealt] for dealt in (False, True)]
        return tuple(replace(self, parameters=own) for own in kinds if own) if all(kinds) else (self,)

    def _parts(self, parameter: ParameterCount) -> int:
        return self.expert_shards if parameter.is_expert else self.shards

    @cached_property
    def padded(self) -> list[tuple[ParameterCount, int]]:
        """Each parameter with the elements of a rank's shard."""
        return [(p, shard_numel(p, self._parts(p))) for p in self.parameters]

    @cached_property
    def _gathers(self) -> list[tuple[ParameterCount, int]]:
        return [pair for pair in self.padded if not pair[0].is_listed]

    @cached_property
    def held(self) -> int:
        return sum(numel * p.dtype.itemsize for p, numel in self.padded)

    @cached_property
    def gathered(self) -> int:
        if not self.is_sharded:
            return 0
        return sum(numel * self._parts(p) * _gathered(p).itemsize for p, numel in self._gathers)

    @cached_property
    def flat(self) -> int:
        """The buffer of an all-gather; a single rank copies without one."""
        many = ((p, numel) for p, numel in self._gathers if self._parts(p) > 1)
        return sum(numel * self._parts(p) * _gathered(p).itemsize for p, numel in many)

    @cached_property
    def reduces_in(self) -> torch.dtype | None:
        """In which gradients are added up, where that isn't their own."""
        halves = any(_gathered(p) in (torch.bfloat16, torch.float16) for p in self.parameters)
        return torch.float32 if halves else None

    def gradient(self, parameter: ParameterCount) -> torch.dtype:
        return self.reduces_in or parameter.dtype

    @cached_property
    def accumulated(self) -> int:
        """Gradients of whole parameters, in the type in which they are added up."""
        return sum(p.numel * self.gradient(p).itemsize for p in self._trained)

    @cached_property
    def fresh(self) -> int:
        """Gradients of whole parameters as a backward makes them."""
        return sum(p.gathered_bytes for p in self._trained)

    @cached_property
    def reduced(self) -> int:
        """Gradients of shards."""
        return sum(numel * p.dtype.itemsize for p, numel in self.padded if p.requires_grad)

    @cached_property
    def reducing(self) -> int:
        """The buffer of a reduce-scatter: whole gradients."""
        if not self.is_sharded:
            return 0
        trained = ((p, numel) for p, numel in self._gathers if p.requires_grad)
        return sum(numel * self._parts(p) * self.gradient(p).itemsize for p, numel in trained)

    @property
    def _trained(self) -> Iterator[ParameterCount]:
        return (p for p, _ in self._gathers if p.requires_grad)


def shard_numel(parameter: ParameterCount, parts: int) -> int:
    """Elements of the largest shard: rows are dealt as ``torch.chunk`` does, and padded to the most that a rank gets.

    Experts are cut along the first dim that divides evenly.
    """
    sizes = parameter.local_shape
    if not sizes or not parameter.numel:
        return parameter.numel
    is_dealt = parameter.is_expert or parameter.is_listed
    dim = next((d for d, size in enumerate(sizes) if size % parts == 0), 0) if is_dealt else 0
    return parameter.numel // sizes[dim] * -(-sizes[dim] // parts)


def _gathered(parameter: ParameterCount) -> torch.dtype:
    return parameter.gathered_dtype or parameter.dtype


class Stage:
    """One stage's parts and units, for the moments of a step.

    Args:
        counts: Of one microbatch, for the layout's tensor and expert axes.
        blocks: The stage's.
        optimizer: What its state is of; ``None`` where that is unknown, and counts nothing.

    Attributes:
        parts: What it runs, in order.
        costs: Each part's, in the way that it is run.
        units: Of its blocks, by name.
        root: The unit of all else.
        of_loss: The names of what runs after the last block.
    """

    def __init__(
        self, counts: Counts, layout: Layout, blocks: range, held: Held, optimizer: OptimizerState | None = None
    ) -> None:
        self.counts = counts
        self._layout = layout
        self.held = held
        self._blocks = blocks
        self.parts = counts.of_stage(blocks)
        self._own = counts.blocks[blocks.start : blocks.stop]
        recomputed = {counts.blocks[place].name for place in chosen(len(counts.blocks), held.activation_checkpointing)}
        selective = held.activation_checkpointing == "selective"
        self.costs = [
            (part.selective if selective else part.recomputed) if part.name in recomputed else part.plain
            for part in self.parts
        ]
        self.units, self.root = self._make_units()
        self.of_loss = {part.name for place, part in counts.parts if place == len(counts.blocks)} | {counts.loss.name}
        self.optimizer = optimizer

    def _make_units(self) -> tuple[dict[str, Unit], Unit]:
        shards = self._layout.shard_size
        sizes = shards, shards // self._layout.expert_parallel_size, self._is_sharded()
        named = {part.name: part for part in self.parts}
        uses = Counter(name for part in named.values() for name in {p.name for p in part.parameters})
        elsewhere = self.counts.uses
        block_names = {block.name for block in self._own}
        units: dict[str, Unit] = {}
        root = Unit([], *sizes)
        seen: set[str] = set()
        for name, part in named.items():
            own = [p for p in part.parameters if p.name not in seen]
            seen.update(p.name for p in own)
            shared = any(uses[p.name] > 1 or elsewhere[p.name] > 1 for p in part.parameters)
            if name not in block_names or shared:
                root.parameters += own
                continue
            cast = [p for p in own if p.gathered_dtype is not None]
            units[name] = Unit([p for p in own if p in cast or p.is_expert] if cast else own, *sizes)
            root.parameters += [p for p in own if cast and p.gathered_dtype is None and not p.is_expert]
        return units, root

    def _is_sharded(self) -> bool:
        """Whether parameters are FSDP2's; as :mod:`lightning_shard.parallel.fsdp.shard` decides it."""
        layout = self._layout
        if layout.data_parallel_size > 1 or self.held.cpu_offload:
            return True
        parameters = [p for part in self.counts.of_stage(range(len(self.counts.blocks))) for p in part.parameters]
        return any(p.gathered_dtype is not None or p.dtype not in _WHOLE for p in parameters)

    @property
    def keeps_gathered(self) -> bool:
        """Whether blocks stay gathered for the whole step."""
        reshards = self.held.reshard_after_forward
        return self._layout.pipeline_parallel_size > 1 if reshards is None else not reshards

    @property
    def knows_optimizer(self) -> bool:
        return self.optimizer is not None

    def units_of(self, part: PartCount) -> tuple[Unit, ...]:
        """What is gathered for a part apart from the root, in the order of a forward."""
        unit = self.units.get(part.name)
        return () if unit is None else unit.gathered_apart

    @property
    def all_units(self) -> list[Unit]:
        return [*self.units.values(), self.root]

    @cached_property
    def shards(self) -> list[tuple[ParameterCount, int]]:
        """The stage's parameters with the elements of a rank's shard."""
        return [pair for unit in self.all_units for pair in unit.padded]

    @cached_property
    def received(self) -> int:
        """Bytes of what a microbatch brings from the stage before."""
        return self.counts.blocks[self._blocks.start - 1].output if self._blocks.start else 0

    @cached_property
    def handed_on(self) -> int:
        """Bytes of what a microbatch takes to the next stage."""
        return 0 if self._blocks.stop == len(self.counts.blocks) else self.counts.blocks[self._blocks.stop - 1].output

    @cached_property
    def state_bytes(self) -> int:
        state = self.optimizer
        return sum(state.bytes(p, numel) for p, numel in self.shards) if state is not None else 0


class Rank:
    """One rank of a pipeline, with its stages.

    Args:
        stages: By number; of all ranks, or of this one.
        schedule: The pipeline's order.
        rank: Which of its ranks.

    Attributes:
        stages: This rank's, by number.
        row: Its order.
        splits: Whether any backward of the pipeline comes in two parts.
        brought: Bytes of what a microbatch brings from another rank, by stage.
        taken: Bytes of what a microbatch takes to another rank, by stage.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, rank: int) -> None:
        holder = schedule.rank_of
        self.stages = {index: stages[index] for index in schedule.stages_of(rank)}
        self.row = schedule.rows[rank]
        self.splits = schedule.splits_backwards
        self.brought = {i: stage.received * (holder.get(i - 1) != rank) for i, stage in self.stages.items()}
        self.taken = {i: stage.handed_on * (holder.get(i + 1) != rank) for i, stage in self.stages.items()}

    @cached_property
    def units(self) -> list[Unit]:
        """Of the blocks of all stages, and of experts in them."""
        of_blocks = (unit for stage in self.stages.values() for unit in stage.units.values())
        return [unit for of_block in of_blocks for unit in of_block.gathered_apart]

    @cached_property
    def root(self) -> Unit:
        """What isn't in a block alone, of all stages together: a parameter of several is one."""
        first, *others = (stage.root for stage in self.stages.values())
        parameters = {p.name: p for root in (first, *others) for p in root.parameters}
        return replace(first, parameters=[*parameters.values()]) if others else first

    @cached_property
    def shards(self) -> list[tuple[ParameterCount, int]]:
        """The parameters with the elements of a rank's shard."""
        return [pair for unit in (*self.units, self.root) for pair in unit.padded]

    @property
    def held(self) -> Held:
        return next(iter(self.stages.values())).held

    @property
    def optimizer(self) -> OptimizerState | None:
        return next(iter(self.stages.values())).optimizer

    @cached_property
    def state_bytes(self) -> int:
        state = self.optimizer
        return sum(state.bytes(p, numel) for p, numel in self.shards) if state is not None else 0
