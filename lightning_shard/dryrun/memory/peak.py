"""What a stage and a rank hold: parts, FSDP2 units and their bytes. Pure arithmetic on counts.

``moments.py`` computes what a rank holds at each moment of a step. Not counted: memory of the device's driver, the
allocator's fragmentation, and communicators; see ``RESERVED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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


@dataclass
class Unit:
    """An FSDP2 unit: the parameters that are gathered for a block. Sizes are in bytes."""

    parameters: list[ParameterCount] = field(default_factory=list)
    shards: int = 1  # over how many ranks the parameters are sharded
    expert_shards: int = 1  # the same for experts' parameters
    is_sharded: bool = True  # whether FSDP2 is used; without it nothing is gathered, and no gradient reduced

    @cached_property
    def gathered_apart(self) -> tuple[Unit, ...]:
        """The units of a block and of its sharded experts, which FSDP2 gathers separately, in the forward's order."""
        kinds = [[p for p in self.parameters if p.is_expert is dealt] for dealt in (False, True)]
        return tuple(replace(self, parameters=own) for own in kinds if own) if all(kinds) else (self,)

    def _parts(self, parameter: ParameterCount) -> int:
        return self.expert_shards if parameter.is_expert else self.shards

    @cached_property
    def padded(self) -> list[tuple[ParameterCount, int]]:
        """Each parameter with the number of elements of a rank's (padded) shard."""
        return [(p, shard_numel(p, self._parts(p))) for p in self.parameters]

    @cached_property
    def _gathers(self) -> list[tuple[ParameterCount, int]]:
        return [pair for pair in self.padded if not pair[0].is_listed]

    @cached_property
    def held(self) -> int:
        return sum(numel * p.dtype.itemsize for p, numel in self.padded)

    def _whole(self, dtype: Callable[[ParameterCount], torch.dtype], chosen: Callable[[ParameterCount], bool]) -> int:
        """Bytes of whole parameters, padded, of a dtype."""
        return sum(numel * self._parts(p) * dtype(p).itemsize for p, numel in self._gathers if chosen(p))

    @cached_property
    def gathered(self) -> int:
        return self._whole(_gathered, lambda _: True) if self.is_sharded else 0

    @cached_property
    def flat(self) -> int:
        """The buffer of the unit's all-gather; none for parameters on a single rank, which are copied."""
        return self._whole(_gathered, lambda p: self._parts(p) > 1)

    @cached_property
    def reduces_in(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated and reduced, if it isn't their own."""
        halves = any(_gathered(p) in (torch.bfloat16, torch.float16) for p in self.parameters)
        return torch.float32 if halves else None

    def gradient(self, parameter: ParameterCount) -> torch.dtype:
        return self.reduces_in or parameter.dtype

    @cached_property
    def accumulated(self) -> int:
        """Gradients of whole parameters, in the dtype of accumulation."""
        return sum(p.numel * self.gradient(p).itemsize for p in self._trained)

    @cached_property
    def fresh(self) -> int:
        """Gradients of whole parameters, in the dtype in which a backward creates them."""
        return sum(p.gathered_bytes for p in self._trained)

    @cached_property
    def reduced(self) -> int:
        """Gradients of shards."""
        return sum(numel * p.dtype.itemsize for p, numel in self.padded if p.requires_grad)

    @cached_property
    def reducing(self) -> int:
        """The buffer of a reduce-scatter: whole gradients."""
        return self._whole(self.gradient, lambda p: p.requires_grad) if self.is_sharded else 0

    @property
    def _trained(self) -> Iterator[ParameterCount]:
        return (p for p, _ in self._gathers if p.requires_grad)


def shard_numel(parameter: ParameterCount, parts: int) -> int:
    """Elements of the largest of ``parts`` shards: dim 0 is cut as by ``torch.chunk``, and padded to the largest shard.

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


class _Holder:
    """What holds units' shards: a stage, or a rank."""

    optimizer: OptimizerState | None

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        raise NotImplementedError

    @cached_property
    def shards(self) -> list[tuple[ParameterCount, int]]:
        """The parameters, each with the number of elements of a rank's shard."""
        return [pair for unit in self.every_unit for pair in unit.padded]

    @cached_property
    def state_bytes(self) -> int:
        return sum(self.optimizer.bytes(p, numel) for p, numel in self.shards) if self.optimizer is not None else 0

    @cached_property
    def held_bytes(self) -> int:
        return sum(unit.held for unit in self.every_unit)

    @cached_property
    def reduced_bytes(self) -> int:
        """Bytes of the shards' gradients."""
        return sum(unit.reduced for unit in self.every_unit)


class Stage(_Holder):
    """One stage's parts and FSDP2 units; an ``optimizer`` of ``None`` counts nothing.

    Attributes:
        parts: What the stage runs, in order.
        costs: Each part's cost, in the way that it is run (plain or recomputed).
        units: The units of its blocks, by name.
        root: The unit of all other parameters.
        of_loss: The names of what runs after the last block.
    """

    def __init__(
        self, counts: Counts, layout: Layout, blocks: range, held: Held, optimizer: OptimizerState | None = None
    ) -> None:
        self.counts, self.held, self.optimizer = counts, held, optimizer
        self._layout, self._blocks = layout, blocks
        self.parts = counts.of_stage(blocks)
        recomputed = {counts.blocks[place].name for place in chosen(len(counts.blocks), held.activation_checkpointing)}
        selective = held.activation_checkpointing == "selective"
        self.costs = [
            (part.selective if selective else part.recomputed) if part.name in recomputed else part.plain
            for part in self.parts
        ]
        self.units, self.root = self._make_units()
        self.of_loss = {part.name for place, part in counts.parts if place == len(counts.blocks)} | {counts.loss.name}

    def _make_units(self) -> tuple[dict[str, Unit], Unit]:
        shards = self._layout.shard_size
        sizes = shards, shards // self._layout.expert_parallel_size, self._is_sharded()
        named = {part.name: part for part in self.parts}
        uses = Counter(name for part in named.values() for name in {p.name for p in part.parameters})
        elsewhere = self.counts.uses
        block_names = {block.name for block in self.counts.blocks[self._blocks.start : self._blocks.stop]}
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
        """Whether FSDP2 is applied; the same rule as in :mod:`lightning_shard.parallel.fsdp.shard`."""
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

    def units_of(self, part: PartCount) -> tuple[Unit, ...]:
        """The units that are gathered for a part, without the root, in the forward's order."""
        unit = self.units.get(part.name)
        return () if unit is None else unit.gathered_apart

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        return (*self.units.values(), self.root)

    @cached_property
    def received(self) -> int:
        """Bytes that a microbatch's forward receives from the previous stage."""
        return self.counts.blocks[self._blocks.start - 1].output if self._blocks.start else 0

    @cached_property
    def handed_on(self) -> int:
        """Bytes that a microbatch's forward sends to the next stage."""
        return 0 if self._blocks.stop == len(self.counts.blocks) else self.counts.blocks[self._blocks.stop - 1].output


class Rank(_Holder):
    """One pipeline rank, with its stages; it is given at least its own, by number.

    Attributes:
        stages: This rank's stages by number.
        row: This rank's actions, in order.
        splits: Whether the schedule splits any backward.
        brought: By stage, bytes that a microbatch's forward receives from another rank.
        taken: By stage, bytes that a microbatch's forward sends to another rank.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, rank: int) -> None:
        holder, one = schedule.rank_of, stages[schedule.stages_of(rank)[0]]
        self.held, self.optimizer = one.held, one.optimizer
        self.stages = {index: stages[index] for index in schedule.stages_of(rank)}
        self.row = schedule.rows[rank]
        self.splits = schedule.splits_backwards
        self.brought = {i: stage.received * (holder.get(i - 1) != rank) for i, stage in self.stages.items()}
        self.taken = {i: stage.handed_on * (holder.get(i + 1) != rank) for i, stage in self.stages.items()}

    @cached_property
    def units(self) -> list[Unit]:
        """The units of all stages' blocks, with their experts' units."""
        of_blocks = (unit for stage in self.stages.values() for unit in stage.units.values())
        return [unit for of_block in of_blocks for unit in of_block.gathered_apart]

    @cached_property
    def root(self) -> Unit:
        """The root unit of all stages together; a parameter that several stages have counts once."""
        first, *others = (stage.root for stage in self.stages.values())
        parameters = {p.name: p for root in (first, *others) for p in root.parameters}
        return replace(first, parameters=[*parameters.values()]) if others else first

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        return (*self.units, self.root)
