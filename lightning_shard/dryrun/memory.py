"""How much memory each stage's ranks need, moment by moment of a step. Pure arithmetic on counts.

A rank holds, at the moment when it runs one part of one microbatch:

* its shards of parameters and of the optimizer's state, and of gradients from where they are reduced;
* *gathered* parameters, as FSDP2 of torch 2.11 to 2.13 gathers and frees them: what isn't in a block for the whole
  step, blocks for the whole step or while they run, and the buffer of one all-gather;
* gradients that aren't reduced yet, and the buffer of one reduce-scatter;
* *activations*: what autograd keeps of the microbatches in flight; apart from these what was *received* from the stage
  before, and of the *loss*, with all that runs after the last block;
* *working* memory of the part that runs: by how much memory grows while it does.

Not counted are what a device's driver, its allocator's fragments and communicators take: see ``RESERVED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lightning_shard.dryrun.counts import Counts, ParameterCount, PartCount
from lightning_shard.dryrun.optimizer import OptimizerState
from lightning_shard.layout import Layout
from lightning_shard.parallel.recompute import Recomputing, chosen
from lightning_shard.pipeline.schedule import Action, Schedule

RESERVED = 0.06
"""Of a device's memory: what is left to its driver, communicators and the allocator's fragments."""
KINDS = ("parameters", "optimizer", "gradients", "gathered", "activations", "received", "loss", "working", "batch")
_WHOLE = (torch.float32, torch.float64)
"""Types of parameters that a single rank holds as they are, without FSDP2."""
_KEPT = ("activations", "received", "loss")
"""Kinds of what is kept for microbatches in flight."""


def usable(device_memory: int) -> int:
    """Bytes that tensors can have of a device's memory."""
    return int(device_memory * (1 - RESERVED))


@dataclass(frozen=True)
class Held:
    """Settings that decide what is held.

    Attributes:
        accumulates: Batches for an optimizer step (``accumulate_grad_batches``).
    """

    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    reduce_each_microbatch: bool = False
    reshard_after_forward: bool | None = None
    accumulates: int = 1


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
        what = "forward" if self.action.kind == "F" else "backward"
        return f"{what} of {self.part}, microbatch {self.action.microbatch}"


@dataclass(frozen=True)
class StageMemory:
    """Of a rank of one stage: the one that holds most, where shards differ.

    Attributes:
        peak: The moment at which its device holds most.
        host: Bytes in the host's memory, by kind: what is offloaded, and an asynchronous save's copy.
        moments: In the order of a step.
        parameters: Elements that a rank holds.
    """

    stage: int
    peak: Moment
    host: Mapping[str, int]
    moments: tuple[Moment, ...]
    parameters: int


@dataclass
class Unit:
    """What FSDP2 gathers at once; bytes. Where nothing is sharded, nothing is gathered, and no gradient reduced."""

    parameters: list[ParameterCount] = field(default_factory=list)
    shards: int = 1
    expert_shards: int = 1
    is_sharded: bool = True

    def _parts(self, parameter: ParameterCount) -> int:
        return self.expert_shards if parameter.is_expert else self.shards

    @cached_property
    def padded(self) -> list[tuple[ParameterCount, int]]:
        """Each parameter with the elements of a rank's shard."""
        return [(p, shard_numel(p, self._parts(p))) for p in self.parameters]

    @cached_property
    def held(self) -> int:
        return sum(numel * p.dtype.itemsize for p, numel in self.padded)

    @cached_property
    def gathered(self) -> int:
        if not self.is_sharded:
            return 0
        return sum(numel * self._parts(p) * _gathered(p).itemsize for p, numel in self.padded)

    @cached_property
    def flat(self) -> int:
        """The buffer of an all-gather; a single rank copies without one."""
        many = ((p, numel) for p, numel in self.padded if self._parts(p) > 1)
        return sum(numel * self._parts(p) * _gathered(p).itemsize for p, numel in many)

    @cached_property
    def reduces_in(self) -> torch.dtype | None:
        """In which gradients are added up, where that isn't their own."""
        halves = any(_gathered(p) in (torch.bfloat16, torch.float16) for p in self.parameters)
        return torch.float32 if halves else None

    def _gradient(self, parameter: ParameterCount) -> torch.dtype:
        return self.reduces_in or parameter.dtype

    @cached_property
    def accumulated(self) -> int:
        """Gradients of whole parameters, in the type in which they are added up."""
        return sum(p.numel * self._gradient(p).itemsize for p in self._trained)

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
        trained = ((p, numel) for p, numel in self.padded if p.requires_grad)
        return sum(numel * self._parts(p) * self._gradient(p).itemsize for p, numel in trained)

    @property
    def _trained(self) -> Iterator[ParameterCount]:
        return (p for p in self.parameters if p.requires_grad)


def shard_numel(parameter: ParameterCount, parts: int) -> int:
    """Elements of the largest shard: rows are dealt as ``torch.chunk`` does, and padded to the most that a rank gets.

    Experts are cut along the first dim that divides evenly.
    """
    sizes = parameter.local_shape
    if not sizes or not parameter.numel:
        return parameter.numel
    dim = next((d for d, size in enumerate(sizes) if size % parts == 0), 0) if parameter.is_expert else 0
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
    """

    def __init__(
        self, counts: Counts, layout: Layout, blocks: range, held: Held, optimizer: OptimizerState | None = None
    ) -> None:
        self._counts = counts
        self._layout = layout
        self._held = held
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
        self._optimizer = optimizer

    def _make_units(self) -> tuple[dict[str, Unit], Unit]:
        shards = self._layout.shard_size
        sizes = shards, shards // self._layout.expert_parallel_size, self._is_sharded()
        named = {part.name: part for part in self.parts}
        uses = Counter(name for part in named.values() for name in {p.name for p in part.parameters})
        elsewhere = Counter(p.name for part in self._all_parts() for p in part.parameters)
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
            units[name] = Unit(cast or own, *sizes)
            root.parameters += [p for p in own if cast and p.gathered_dtype is None]
        return units, root

    def _is_sharded(self) -> bool:
        """Whether parameters are FSDP2's; as :mod:`lightning_shard.parallel.data` decides it."""
        layout = self._layout
        if layout.data_parallel_size > 1 or layout.tensor_parallel_size > 1 or self._held.cpu_offload:
            return True
        parameters = [p for part in self._counts.of_stage(range(len(self._counts.blocks))) for p in part.parameters]
        return any(p.gathered_dtype is not None or p.dtype not in _WHOLE for p in parameters)

    def _all_parts(self) -> Iterable[PartCount]:
        return {part.name: part for _, part in self._counts.in_order()}.values()

    @property
    def keeps_gathered(self) -> bool:
        """Whether blocks stay gathered for the whole step."""
        reshards = self._held.reshard_after_forward
        return self._layout.pipeline_parallel_size > 1 if reshards is None else not reshards

    @property
    def knows_optimizer(self) -> bool:
        return self._optimizer is not None

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
        return self._counts.blocks[self._blocks.start - 1].output if self._blocks.start else 0

    def memory(self, actions: Sequence[Action], stage: int, *, copies: bool = False) -> StageMemory:
        """The moments of a step in this order.

        Args:
            copies: Whether saves are asynchronous, by a copy in the host's memory.
        """
        moments = tuple(self.moments(actions))
        state = {
            "parameters": sum(unit.held for unit in self.all_units),
            "optimizer": self.state_bytes,
            "gradients": sum(unit.reduced for unit in self.all_units),
        }
        host = dict(state) if self._held.cpu_offload else {}
        if copies:
            host["copy"] = state["parameters"] + state["optimizer"]
        peak = max(moments, key=lambda moment: moment.total)
        return StageMemory(stage, peak, host, moments, sum(numel for _, numel in self.shards))

    @cached_property
    def state_bytes(self) -> int:
        state = self._optimizer
        return sum(state.bytes(p, numel) for p, numel in self.shards) if state is not None else 0

    def moments(self, actions: Sequence[Action]) -> Iterator[Moment]:
        """Of the actions of one optimizer step, and of that."""
        step = _Step(self, actions)
        for turn in range(self._held.accumulates):
            is_last = turn == self._held.accumulates - 1
            for place, action in enumerate(actions):
                last = is_last and not any(a.kind == "B" for a in actions[place + 1 :])
                yield from step.forward(action) if action.kind == "F" else step.backward(action, last)
        trained = (numel * p.dtype.itemsize for p, numel in self.shards if p.requires_grad)
        yield step.update(self._optimizer.steps_with(list(trained)) if self._optimizer is not None else 0)


class _Step:
    """What a rank of a stage holds while its actions go by."""

    def __init__(self, stage: Stage, actions: Sequence[Action]) -> None:
        self._stage = stage
        held = stage._held
        self._keeps = stage.keeps_gathered
        self._adds = not held.reduce_each_microbatch and (len(actions) > 2 or held.accumulates > 1)
        self._gathered = False
        self._whole: dict[int, int] = {}
        self._reduced = 0
        self._buffer = 0
        self._flight: dict[int, Counter[str]] = {}
        after = {part.name for place, part in stage._counts.parts if place == len(stage._counts.blocks)}
        self._of_loss = {*after, stage._counts.loss.name}
        offloads = held.cpu_offload
        self._base = {
            "parameters": 0 if offloads else sum(unit.held for unit in stage.all_units),
            "optimizer": 0 if offloads else stage.state_bytes,
            "batch": stage._counts.batch_bytes * len({a.microbatch for a in actions}),
        }

    def _moment(self, action: Action | None, part: str, gathered: int, gradients: int, working: int) -> Moment:
        reduced = 0 if self._stage._held.cpu_offload else self._reduced
        return Moment(
            action,
            part,
            {
                **self._base,
                "gradients": reduced + self._buffer + sum(self._whole.values()) + gradients,
                "gathered": gathered,
                **{kind: sum(kept[kind] for kept in self._flight.values()) for kind in _KEPT},
                "working": working,
            },
        )

    def _kind(self, part: PartCount) -> str:
        return "loss" if part.name in self._of_loss else "activations"

    def _of_blocks(self) -> int:
        return sum(unit.gathered for unit in self._stage.units.values()) if self._keeps and self._gathered else 0

    def forward(self, action: Action) -> Iterator[Moment]:
        stage = self._stage
        kept = self._flight[action.microbatch] = Counter(received=stage.received)
        done: int = 0
        flat = 0
        for part, cost in zip(stage.parts, stage.costs):
            unit = stage.units.get(part.name)
            gathered = stage.root.gathered + self._of_blocks()
            if unit is not None and not (self._keeps and self._gathered):
                done += unit.gathered
                flat = unit.flat
                gathered += done if self._keeps else unit.gathered
            elif self._keeps:
                gathered += done
            yield self._moment(action, part.name, gathered + flat, 0, cost.forward_peak)
            kept[self._kind(part)] += cost.kept
        self._gathered = True

    def backward(self, action: Action, is_last: bool) -> Iterator[Moment]:
        stage = self._stage
        reduces = is_last or stage._held.reduce_each_microbatch
        order = list(zip(stage.parts, stage.costs))[::-1]
        units = [unit for part, _ in order if (unit := stage.units.get(part.name)) is not None]
        freed = 0
        for part, cost in order:
            unit = stage.units.get(part.name)
            gathered = stage.root.gathered + self._of_blocks() - freed
            if unit is not None and not self._keeps:
                following = units[units.index(unit) + 1 :]
                gathered += unit.gathered + (following[0].flat if following else 0)
            first = stage.root if unit is None else unit
            adds_in_place = id(first) in self._whole and first.reduces_in is None
            working = (cost.adding_peak if adds_in_place else cost.backward_peak) + part.output
            yield self._moment(action, part.name, gathered, 0, working)
            self._flight[action.microbatch][self._kind(part)] -= cost.kept
            if unit is None:
                own = [p for p in part.parameters if p.requires_grad]
                whole = sum(p.numel * stage.root._gradient(p).itemsize for p in own)
                known = self._whole.get(id(stage.root), 0)
                self._whole[id(stage.root)] = min(known + whole, stage.root.accumulated)
                continue
            if not reduces:
                converting = unit.fresh if unit.reduces_in is not None else 0
                yield self._moment(action, part.name, gathered, converting, part.output)
                self._whole[id(unit)] = unit.accumulated
                continue
            if is_last or not self._keeps:
                gathered -= unit.gathered
            yield self._reduce(action, part.name, unit, gathered, part.output)
            if self._keeps and is_last:
                freed += unit.gathered
        if reduces:
            yield self._reduce(action, order[-1][0].name, stage.root, 0 if is_last else stage.root.gathered)
        if is_last:
            self._gathered = False
            self._buffer = 0
        del self._flight[action.microbatch]

    def _reduce(self, action: Action, part: str, unit: Unit, gathered: int, working: int = 0) -> Moment:
        """Whole gradients into the buffer of a reduce-scatter; the one of the unit before has been freed."""
        self._buffer = 0
        whole = self._whole.pop(id(unit), None)
        gradients = unit.fresh if whole is None else unit.accumulated
        if unit.is_sharded:
            gradients += unit.reducing + unit.reduced
        moment = self._moment(action, part, gathered, gradients, working)
        self._buffer = unit.reducing
        self._reduced = min(self._reduced + unit.reduced, sum(u.reduced for u in self._stage.all_units))
        return moment

    def update(self, working: int) -> Moment:
        """The optimizer's step."""
        return self._moment(None, "", 0, 0, 0 if self._stage._held.cpu_offload else working)


def stage_memories(
    counts: Counts,
    layout: Layout,
    stages: Sequence[range],
    schedule: Schedule,
    held: Held,
    optimizer: OptimizerState | None,
    *,
    copies: bool = False,
) -> tuple[StageMemory, ...]:
    """Of each stage.

    Args:
        stages: Each stage's blocks.
        copies: Whether saves are asynchronous.
    """
    return tuple(
        Stage(counts, layout, blocks, held, optimizer).memory(row, index, copies=copies)
        for index, (blocks, row) in enumerate(zip(stages, schedule.rows, strict=True))
    )
