"""How much memory a rank of a pipeline needs, moment by moment of a step. Pure arithmetic on what its stages hold.

A rank holds, at the moment when it runs one part of one microbatch:

* its shards of parameters and of the optimizer's state, and of gradients from where they are reduced;
* *gathered* parameters, as FSDP2 of torch 2.11 to 2.13 gathers and frees them: what isn't in a block for the whole
  step, blocks for the whole step or while they run, and the buffer of one all-gather;
* gradients that aren't reduced yet, and the buffer of one reduce-scatter;
* *activations*: what autograd keeps of the microbatches in flight; apart from these those of the *loss*, with all that
  runs after the last block;
* what was *received*: of each microbatch in flight the values and the copy of them that the blocks may change, buffers
  for what the next action waits for, the gradient that a backward began with, and what is still being sent;
* *working* memory of the part that runs: by how much memory grows while it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from lightning_shard.dryrun.counts import Counts, ParameterCount, PartCount
from lightning_shard.dryrun.memory import Held, Moment, Stage, StageMemory, Unit
from lightning_shard.dryrun.optimizer import OptimizerState
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedule import Action, Row, Schedule

_KEPT = ("activations", "received", "loss")
"""Kinds of what is kept for microbatches in flight."""


class Rank:
    """One rank of a pipeline, with its stages.

    Args:
        stages: By number; of all ranks, or of this one.
        schedule: The pipeline's order.
        rank: Which of its ranks.

    Attributes:
        stages: This rank's, by number.
        row: Its order.
        brought: Bytes of what a microbatch brings from another rank, by stage.
        taken: Bytes of what a microbatch takes to another rank, by stage.
    """

    def __init__(self, stages: Mapping[int, Stage], schedule: Schedule, rank: int) -> None:
        holder = schedule.rank_of
        self.stages = {index: stages[index] for index in schedule.stages_of(rank)}
        self.row = schedule.rows[rank]
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

    def memory(self, *, copies: bool = False) -> StageMemory:
        """The moments of a step.

        Args:
            copies: Whether saves are asynchronous, by a copy in the host's memory.
        """
        moments = tuple(self.moments())
        units = (*self.units, self.root)
        state = {
            "parameters": sum(unit.held for unit in units),
            "optimizer": self.state_bytes,
            "gradients": sum(unit.reduced for unit in units),
        }
        host = dict(state) if self.held.cpu_offload else {}
        if copies:
            host["copy"] = state["parameters"] + state["optimizer"]
        return StageMemory(
            tuple(self.stages),
            tuple(_most_in_flight(self.row, stage) for stage in self.stages),
            max(moments, key=lambda moment: moment.total),
            host,
            moments,
            sum(numel for _, numel in self.shards),
        )

    def moments(self) -> Iterator[Moment]:
        """Of the actions of one optimizer step, and of that."""
        step = _Step(self)
        last = max(place for place, action in enumerate(self.row) if action.kind in "BW")
        for turn in range(self.held.accumulates):
            step.begin()
            for place, action in enumerate(self.row):
                step.asks_for(*self.row[place + 1 : place + 2])
                if action.kind == "F":
                    yield from step.forward(action)
                else:
                    ends_batch = place == last
                    reduces = ends_batch and turn == self.held.accumulates - 1
                    yield from step.backward(action, ends_batch=ends_batch, reduces=reduces)
        trained = (numel * p.dtype.itemsize for p, numel in self.shards if p.requires_grad)
        yield step.update(self.optimizer.steps_with(list(trained)) if self.optimizer is not None else 0)


class _Step:
    """What a rank holds while its actions go by."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._held = held = rank.held
        stages = rank.stages.values()
        self._keeps = all(stage.keeps_gathered for stage in stages)
        self._is_pipeline = any(stage.received or stage.handed_on for stage in stages)
        self._blocks = 0
        """Bytes of blocks that stay gathered, or are being gathered to stay so."""
        self._gathered: set[int] = set()
        self._whole: dict[int, int] = {}
        self._fresh = 0
        """Bytes of the root's gradients that this backward made in a type in which they aren't added up."""
        self._reduced = 0
        self._buffer = 0
        self._flight: dict[tuple[int, int], Counter[str]] = {}
        self._leaving = 0
        self._asked_for = 0
        offloads = held.cpu_offload
        counts = next(iter(stages)).counts
        self._base = {
            "parameters": 0 if offloads else sum(unit.held for unit in (*rank.units, rank.root)),
            "optimizer": 0 if offloads else rank.state_bytes,
            "batch": counts.batch_bytes * len({action.microbatch for action in rank.row}),
        }

    def _moment(
        self, action: Action | None, part: str, gathered: int, gradients: int, working: int, crossing: int = 0
    ) -> Moment:
        reduced = 0 if self._held.cpu_offload else self._reduced
        kept = {kind: sum(kept[kind] for kept in self._flight.values()) for kind in _KEPT}
        kept["received"] += self._leaving + self._asked_for + crossing
        return Moment(
            action,
            part,
            {
                **self._base,
                "gradients": reduced + self._buffer + sum(self._whole.values()) + self._fresh + gradients,
                "gathered": gathered,
                **kept,
                "working": working,
            },
        )

    def begin(self) -> None:
        """A batch: a pipeline begins to gather all that stays so."""
        if self._keeps and self._is_pipeline:
            self._blocks = sum(unit.flat for unit in self._rank.units)

    def asks_for(self, following: Action | None = None) -> None:
        """Buffers for what the next action waits for."""
        if following is None or following.kind == "W":
            self._asked_for = 0
        else:
            crossing = self._rank.brought if following.kind == "F" else self._rank.taken
            self._asked_for = crossing[following.stage]

    def forward(self, action: Action) -> Iterator[Moment]:
        rank, stage = self._rank, self._rank.stages[action.stage]
        kept = self._flight[action.stage, action.microbatch] = Counter(
            received=rank.brought[action.stage] + stage.received
        )
        flat = 0
        is_first = stage.received > 0
        for part, cost in zip(stage.parts, stage.costs):
            units = stage.units_of(part)
            gathered = rank.root.gathered
            for unit in units:
                if id(unit) not in self._gathered:
                    flat = unit.flat
                    if self._keeps:
                        self._gathered.add(id(unit))
                        self._blocks += unit.gathered - (unit.flat if self._is_pipeline else 0)
                    else:
                        gathered += unit.gathered
            carried = 0 if is_first and units else cost.carried  # of another stage, and among what was received
            is_first = is_first and not units
            yield self._moment(action, part.name, gathered + self._blocks + flat, 0, cost.forward_peak + carried)
            kept[_kind(stage, part)] += cost.kept

    def backward(self, action: Action, *, ends_batch: bool, reduces: bool) -> Iterator[Moment]:
        """A whole one, or one of its parts.

        Between both parts, gradients are taken to be kept that are as large as what the forward kept.
        """
        rank, stage = self._rank, self._rank.stages[action.stage]
        adds = action.kind in "BW"
        reduces = adds and (reduces or self._held.reduce_each_microbatch)
        kept = self._flight[action.stage, action.microbatch]
        order = list(zip(stage.parts, stage.costs))[::-1]
        to_gather = [unit for part, _ in order for unit in stage.units_of(part)]
        crossing = 0
        for part, cost in order:
            units = stage.units_of(part)
            gathered = rank.root.gathered + self._blocks
            if not self._keeps:
                # FSDP2 begins to gather what comes next where the backward comes to a unit, or to the root
                del to_gather[: len(units)]
                gathered += sum(unit.gathered for unit in units) + sum(unit.flat for unit in to_gather[:1])
            first = units[0] if units else rank.root
            adds_in_place = id(first) in self._whole and first.reduces_in is None
            fresh = 0 if adds_in_place else cost.of_gradients
            working = (cost.adding_peak if adds_in_place else cost.backward_peak) - fresh + part.output
            is_sent = stage.handed_on > 0 and part is order[0][0]  # a copy of its output lives until the end
            freed = 0 if is_sent or not adds else cost.freed
            kept[_kind(stage, part)] -= freed
            yield self._moment(action, part.name, gathered, fresh, working, crossing)
            if is_sent:
                crossing = 2 * stage.handed_on  # that copy, and its gradient
            if not adds:
                kept[_kind(stage, part)] += cost.kept
                continue
            gone = min(max(0, -part.output - cost.experts_done), cost.kept - freed)
            for unit in units[:0:-1]:  # experts, which are done before their block is
                left = max(0, part.output + cost.experts_done)
                kept[_kind(stage, part)] -= gone
                gathered, moment = self._done(action, part, unit, gathered, left, crossing, ends_batch, reduces)
                yield moment
                kept[_kind(stage, part)] += gone
            kept[_kind(stage, part)] -= (2 * cost.kept if action.kind == "W" else cost.kept) - freed
            if units:
                _, moment = self._done(action, part, units[0], gathered, part.output, crossing, ends_batch, reduces)
                yield moment
            else:
                self._add_to_root(part)
        self._convert_root(reduces=reduces)
        if reduces:
            yield from self._reduce_others(action, order[-1][0].name, crossing, ends_batch=ends_batch)
        if action.kind != "W":
            self._send_gradient(action)
        if adds:
            del self._flight[action.stage, action.microbatch]
            self._leaving += rank.taken[action.stage] if self._held.sends_stay else 0
        if ends_batch:
            self._gathered.clear()
            self._blocks = self._leaving = 0
            self._buffer = 0 if reduces else self._buffer

    def _done(
        self,
        action: Action,
        part: PartCount,
        unit: Unit,
        gathered: int,
        working: int,
        crossing: int,
        ends_batch: bool,
        reduces: bool,
    ) -> tuple[int, Moment]:
        """A unit's backward is done; gives what is gathered then, and the moment."""
        if reduces:
            gathered -= self._free(unit, ends_batch=ends_batch)
            return gathered, self._reduce(action, part.name, unit, gathered, working, crossing)
        converting = unit.fresh if unit.reduces_in is not None else 0
        moment = self._moment(action, part.name, gathered, converting, working, crossing)
        self._whole[id(unit)] = unit.accumulated
        return gathered, moment

    def _add_to_root(self, part: PartCount) -> None:
        root = self._rank.root
        trained = [p for p in part.parameters if p.requires_grad]
        if root.reduces_in is not None:
            self._fresh = min(self._fresh + sum(p.gathered_bytes for p in trained), root.fresh)
        else:
            whole = sum(p.numel * root.gradient(p).itemsize for p in trained)
            self._whole[id(root)] = min(self._whole.get(id(root), 0) + whole, root.accumulated)

    def _convert_root(self, *, reduces: bool) -> None:
        """At the end of a backward, to the type in which gradients are added up; or they are reduced as they are."""
        if self._fresh and not reduces:
            self._whole[id(self._rank.root)] = self._rank.root.accumulated
        self._fresh = 0

    def _reduce_others(self, action: Action, part: str, crossing: int, *, ends_batch: bool) -> Iterator[Moment]:
        """What isn't in this stage's blocks: the root and, last of all, what the rank's other stages have added up."""
        rank = self._rank
        for unit in [unit for unit in rank.units if ends_batch and id(unit) in self._whole]:
            self._free(unit, ends_batch=True)
            yield self._reduce(action, part, unit, rank.root.gathered + self._blocks, crossing=crossing)
        yield self._reduce(action, part, rank.root, 0 if ends_batch else rank.root.gathered, crossing=crossing)

    def _send_gradient(self, action: Action) -> None:
        sent = self._rank.brought[action.stage]
        self._leaving = self._leaving + sent if self._held.sends_stay else sent

    def _free(self, unit: Unit, *, ends_batch: bool) -> int:
        """Before a unit is reduced; bytes of it that were gathered and aren't any more."""
        if not self._keeps:
            return unit.gathered
        if not ends_batch or id(unit) not in self._gathered:
            return 0
        self._gathered.remove(id(unit))
        self._blocks -= unit.gathered
        return unit.gathered

    def _reduce(
        self, action: Action, part: str, unit: Unit, gathered: int, working: int = 0, crossing: int = 0
    ) -> Moment:
        """Whole gradients into the buffer of a reduce-scatter, and then that to shards.

        The buffer of the unit before has been freed.
        """
        self._buffer = 0
        whole = self._whole.pop(id(unit), None)
        gradients = unit.fresh if whole is None else unit.accumulated
        if unit.is_sharded:
            gradients = unit.reducing + max(gradients, unit.reduced)
        moment = self._moment(action, part, gathered, gradients, working, crossing)
        self._buffer = unit.reducing
        whole_rank = (*self._rank.units, self._rank.root)
        self._reduced = min(self._reduced + unit.reduced, sum(u.reduced for u in whole_rank))
        return moment

    def update(self, working: int) -> Moment:
        """The optimizer's step."""
        return self._moment(None, "", 0, 0, 0 if self._held.cpu_offload else working)


def _kind(stage: Stage, part: PartCount) -> str:
    return "loss" if part.name in stage.of_loss else "activations"


def _most_in_flight(row: Row, stage: int) -> int:
    alive = most = 0
    for action in row:
        if action.stage == stage:
            alive += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            most = max(most, alive)
    return most


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
    """Of each rank of a pipeline.

    Args:
        stages: Each stage's blocks.
        copies: Whether saves are asynchronous.
    """
    made = {index: Stage(counts, layout, blocks, held, optimizer) for index, blocks in enumerate(stages)}
    return tuple(Rank(made, schedule, rank).memory(copies=copies) for rank in range(len(schedule.rows)))
