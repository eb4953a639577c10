"""Computes the memory of a pipeline rank at each moment of a step. Pure arithmetic on what its stages hold.

At the moment when a rank runs one part of one microbatch, it holds:

* all buffers; its shards of parameters and optimizer state; and its shards of gradients, once they are reduced;
* *gathered* parameters, as FSDP2 of torch 2.11 to 2.14 gathers and frees them: parameters outside of blocks for the
  whole step, blocks for the whole step or while they run, and the buffer of one all-gather;
* unreduced gradients, and the buffer of one reduce-scatter;
* *activations*: what autograd saves of the microbatches in flight; counted separately, those of the *loss*, with
  everything that runs after the last block;
* *received* values: for each microbatch in flight the values, and a copy of them that the blocks may modify; receive
  buffers for the next action; the gradient that a backward began with; and what is still being sent;
* *working* memory: the growth of memory while the current part runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from lightning_shard.dryrun.counting.counts import ParameterCount, PartCount, TwoParts
from lightning_shard.dryrun.memory.peak import Moment, Rank, Stage, StageMemory, Unit
from lightning_shard.pipeline.schedules.schedule import Action, Schedule

_KEPT = ("activations", "received", "loss")
"""Kinds of memory that are kept for microbatches in flight."""


class Step:
    """A rank's memory during a step; its methods must be called in the order of the rank's actions.

    It has many attributes: what the rank holds, by what frees it.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._held = held = rank.held
        stages = rank.stages.values()
        self._keeps = all(stage.keeps_gathered for stage in stages)
        self._is_pipeline = any(stage.received or stage.handed_on for stage in stages)
        self._blocks = 0
        """Bytes of blocks that are gathered, or being gathered, until the end of the step."""
        self._gathered: set[int] = set()
        self._whole: dict[int, int] = {}
        """Bytes of unreduced gradients, in the dtype of accumulation, by ``id`` of their unit."""
        self._all_whole = 0
        """The sum of ``_whole``."""
        self._has_gradient: set[str] = set()
        self._of_root: dict[str, ParameterCount] = {}
        self._fresh = 0
        """Bytes of the root's gradients that this backward created in another dtype than that of accumulation."""
        self._reduced = 0
        self._buffer = 0
        self._flight: dict[tuple[int, int], Counter[str]] = {}
        """What is kept, by stage and microbatch, without the microbatch that is being run."""
        self._in_flight: Counter[str] = Counter()
        """The sum of ``_flight``."""
        self._running: Counter[str] = Counter()
        """What is kept of the microbatch that is being run."""
        self._leaving = self._asked_for = self._crossing = 0
        self._action: Action | None = None
        offloads = held.cpu_offload
        counts = next(iter(stages)).counts
        self._base = {
            "parameters": 0 if offloads else rank.held_bytes,
            "optimizer": 0 if offloads else rank.state_bytes,
            "buffers": counts.buffer_bytes,
            "batch": counts.batch_bytes * len({action.microbatch for action in rank.row}),
        }

    def _moment(self, part: str, gathered: int, gradients: int, working: int = 0) -> Moment:
        reduced = 0 if self._held.cpu_offload else self._reduced
        kept = {kind: self._in_flight[kind] + self._running[kind] for kind in _KEPT}
        kept["received"] += self._leaving + self._asked_for + self._crossing
        gradients += reduced + self._buffer + self._all_whole + self._fresh
        held = {**self._base, "gradients": gradients, "gathered": gathered, **kept, "working": working}
        return Moment(self._action, part, held)

    def begin(self) -> None:
        """Begin a batch: a pipeline starts to gather all blocks that stay gathered."""
        if self._keeps and self._is_pipeline:
            self._blocks = sum(unit.flat for unit in self._rank.units)

    def asks_for(self, following: Action | None = None) -> None:
        """Set the receive buffers for the next action."""
        if following is None or following.kind == "W":
            self._asked_for = 0
        else:
            crossing = self._rank.brought if following.kind == "F" else self._rank.taken
            self._asked_for = crossing[following.stage]

    def forward(self, action: Action) -> Iterator[Moment]:
        rank, stage, self._action = self._rank, self._rank.stages[action.stage], action
        kept = self._running = Counter(received=rank.brought[action.stage] + stage.received)
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
            carried = 0 if is_first and units else cost.carried  # from another stage, so included in what was received
            is_first = is_first and not units
            yield self._moment(part.name, gathered + self._blocks + flat, 0, cost.forward_peak + carried)
            kept[_kind(stage, part)] += cost.kept
        self._keep(action)

    def _keep(self, action: Action) -> None:
        """Store what is kept of the running microbatch until its next action."""
        self._flight[action.stage, action.microbatch] = self._running
        self._in_flight.update(self._running)
        self._running = Counter()

    def _take_up(self, action: Action) -> Counter[str]:
        """Take what is kept of a microbatch, for an action that changes it."""
        self._running = self._flight.pop((action.stage, action.microbatch))
        self._in_flight.subtract(self._running)
        self._action = action
        return self._running

    def backward(self, action: Action, *, ends_batch: bool, reduces: bool) -> Iterator[Moment]:
        """A whole backward, or one part of a split one; ``reduces``: in the last batch before an optimizer step."""
        splits, each = self._rank.splits, self._held.reduce_each_microbatch
        if action.kind == "W":
            yield from self._of_weights(action)
        else:
            # with split backwards, none reduces gradients by itself
            now = not splits and (each or (reduces and ends_batch))
            yield from self._of_parts(action, ends_batch=ends_batch and not splits, reduces=now)
        if splits and action.kind != "I" and ((reduces and ends_batch) or each):
            yield from self._reduce_all(ends_batch=ends_batch)
        if ends_batch:
            self._gathered.clear()
            self._blocks = self._leaving = 0
            self._buffer = 0 if reduces or each else self._buffer

    def _of_parts(self, action: Action, *, ends_batch: bool, reduces: bool) -> Iterator[Moment]:
        """A whole backward; or the first part of a split one, without products' weights, whose inputs are kept."""
        rank, stage = self._rank, self._rank.stages[action.stage]
        assert action.kind == "B" or stage.counts.in_two_parts, "what both parts of a backward keep wasn't counted"
        kept = self._take_up(action)
        order = list(zip(stage.parts, stage.costs))[::-1]
        to_gather = [unit for part, _ in order for unit in stage.units_of(part)]
        for part, cost in order:
            parts = cost.parts if action.kind == "I" and cost.parts is not None else TwoParts(cost)
            first, units = parts.first, stage.units_of(part)
            gathered = rank.root.gathered + self._blocks
            if not self._keeps:
                # FSDP2 prefetches the next unit when the backward reaches a unit, or the root
                del to_gather[: len(units)]
                gathered += sum(unit.gathered for unit in units) + sum(unit.flat for unit in to_gather[:1])
            now = [p for place, p in enumerate(part.parameters) if p.requires_grad and place not in parts.late]
            accumulates_in = (units[0] if units else rank.root).reduces_in
            adds_in_place = accumulates_in is None and self._has_gradient.issuperset(p.name for p in now)
            fresh = 0 if adds_in_place else first.of_gradients
            working = (first.adding_peak if adds_in_place else first.backward_peak) - fresh + part.output
            is_sent = stage.handed_on > 0 and part is order[0][0]  # a copy of its output lives until the end
            freed = 0 if is_sent else first.freed
            kept[_kind(stage, part)] -= freed
            yield self._moment(part.name, gathered, fresh, working)
            kept[_kind(stage, part)] += parts.owed - (cost.kept - freed)
            if is_sent:  # the copy, and its gradient, which may be included in what is owed
                self._crossing = stage.handed_on + max(0, stage.handed_on - parts.given)
            for unit in units[::-1]:
                if reduces:
                    gathered -= self._free(unit, ends_batch=ends_batch)
                    yield self._reduce(part.name, unit, gathered, part.output)
                    continue
                names = {p.name for p, _ in unit.padded}
                own = [p for p in now if p.name in names]
                if unit.reduces_in is not None and own:
                    yield self._moment(part.name, gathered, sum(p.gathered_bytes for p in own), part.output)
                self._add(unit, own)
            if not units:
                self._add_to_root(now)
        self._convert_root(reduces=reduces)
        if reduces:
            yield from self._reduce_others(order[-1][0].name, ends_batch=ends_batch)
        self._has_sent(action)
        if action.kind == "I":
            kept["received"] = 0
            self._keep(action)
        self._running = Counter()

    def _of_weights(self, action: Action) -> Iterator[Moment]:
        """Second part of a split backward. What both parts share is kept until all of the stage's weights are done."""
        rank, stage = self._rank, self._rank.stages[action.stage]
        gathered = rank.root.gathered + self._blocks
        self._take_up(action)
        made: list[tuple[Unit, list[ParameterCount]]] = []
        fresh = 0
        for part, cost in list(zip(stage.parts, stage.costs))[::-1]:
            if cost.parts is None or not cost.parts.late:
                continue
            unit = next(iter(stage.units_of(part)), rank.root)  # experts' weights aren't plain matrices
            late = [part.parameters[place] for place in cost.parts.late]
            if unit.reduces_in is None and self._has_gradient.issuperset(p.name for p in late):
                yield self._moment(part.name, gathered, fresh, cost.parts.weights_adding_peak)
                continue
            own = sum(p.gathered_bytes for p in late)
            yield self._moment(part.name, gathered, fresh + own, max(0, cost.parts.weights_peak - own))
            if unit.reduces_in is None:
                self._add(unit, late)
            else:
                fresh += own
                made.append((unit, late))
        self._running = Counter()
        for unit, late in made:  # converted one by one to the dtype of accumulation
            largest = max(p.numel * unit.gradient(p).itemsize for p in late)
            yield self._moment("", gathered, fresh + largest, 0)
            self._add(unit, late)
            fresh -= sum(p.gathered_bytes for p in late)

    def _reduce_all(self, *, ends_batch: bool) -> Iterator[Moment]:
        """Reduce one unit after the other, the root last; a unit's buffer lives until the next one's."""
        rank = self._rank
        root = rank.root.gathered
        for unit in rank.every_unit:
            if id(unit) not in self._whole:
                continue
            if ends_batch and unit is rank.root:
                root = 0
            elif ends_batch:
                self._free(unit, ends_batch=True)
            yield self._reduce("", unit, root + self._blocks)

    def _has_sent(self, action: Action) -> None:
        """Count the gradient that is sent back; and, if sends stay until the end (gloo), what the forward sent."""
        sent, forward = self._rank.brought[action.stage], self._rank.taken[action.stage]
        self._leaving = self._leaving + sent + forward if self._held.sends_stay else sent
        self._crossing = 0

    def _add(self, unit: Unit, parameters: Iterable[ParameterCount]) -> None:
        """Add whole parameters' gradients, in the dtype of accumulation, if they don't exist yet."""
        new = {p.name: p for p in parameters if p.name not in self._has_gradient}
        if not new:
            return
        self._has_gradient |= new.keys()
        nbytes = sum(p.numel * unit.gradient(p).itemsize for p in new.values())
        self._whole[id(unit)] = self._whole.get(id(unit), 0) + nbytes
        self._all_whole += nbytes

    def _add_to_root(self, trained: Sequence[ParameterCount]) -> None:
        root = self._rank.root
        if root.reduces_in is not None:
            self._fresh = min(self._fresh + sum(p.gathered_bytes for p in trained), root.fresh)
            self._of_root.update((p.name, p) for p in trained)
        else:
            self._add(root, trained)

    def _convert_root(self, *, reduces: bool) -> None:
        """At the end of a backward: convert the root's gradients to the dtype of accumulation, unless reduced now."""
        if self._fresh and not reduces:
            self._add(self._rank.root, self._of_root.values())
        self._fresh = 0
        self._of_root.clear()

    def _reduce_others(self, part: str, *, ends_batch: bool) -> Iterator[Moment]:
        """Reduce what isn't in this stage's blocks: at the batch's end, other stages' units; then the root."""
        rank = self._rank
        for unit in [unit for unit in rank.units if ends_batch and id(unit) in self._whole]:
            self._free(unit, ends_batch=True)
            yield self._reduce(part, unit, rank.root.gathered + self._blocks)
        yield self._reduce(part, rank.root, 0 if ends_batch else rank.root.gathered)

    def _free(self, unit: Unit, *, ends_batch: bool) -> int:
        """Free a unit before it is reduced; returns the gathered bytes that are freed."""
        if not self._keeps:
            return unit.gathered
        if not ends_batch or id(unit) not in self._gathered:
            return 0
        self._gathered.remove(id(unit))
        self._blocks -= unit.gathered
        return unit.gathered

    def _reduce(self, part: str, unit: Unit, gathered: int, working: int = 0) -> Moment:
        """Reduce a unit: whole gradients are copied to a reduce-scatter's buffer, which is reduced to shards.

        The previous unit's buffer has been freed by then.
        """
        self._buffer = 0
        whole = self._whole.pop(id(unit), None)
        self._all_whole -= whole or 0
        self._has_gradient.difference_update(p.name for p, _ in unit.padded)
        gradients = unit.fresh if whole is None else unit.accumulated
        if unit.is_sharded:
            gradients = unit.reducing + max(gradients, unit.reduced)
        moment = self._moment(part, gathered, gradients, working)
        self._buffer = unit.reducing
        self._reduced = min(self._reduced + unit.reduced, self._rank.reduced_bytes)
        return moment

    def update(self, working: int) -> Moment:
        """The optimizer's step."""
        self._action = None
        return self._moment("", 0, 0, 0 if self._held.cpu_offload else working)


def moments_of(rank: Rank) -> Iterator[Moment]:
    """The moments of one optimizer step: of all of the rank's actions, and of the optimizer."""
    step = Step(rank)
    last = max(place for place, action in enumerate(rank.row) if action.kind in "BW")
    for turn in range(rank.held.accumulates):
        reduces = turn == rank.held.accumulates - 1
        step.begin()
        for place, action in enumerate(rank.row):
            step.asks_for(*rank.row[place + 1 : place + 2])
            if action.kind == "F":
                yield from step.forward(action)
            else:
                yield from step.backward(action, ends_batch=place == last, reduces=reduces)
    trained = [numel * p.dtype.itemsize for p, numel in rank.shards if p.requires_grad]
    yield step.update(rank.optimizer.steps_with(trained))


def stage_memories(stages: Sequence[Stage], schedule: Schedule, *, copies: bool = False) -> tuple[StageMemory, ...]:
    """The memory of each pipeline rank; with ``copies``, saves are asynchronous, from a copy in host memory."""
    found = []
    for number in range(len(schedule.rows)):
        rank = Rank(dict(enumerate(stages)), schedule, number)
        moments = tuple(moments_of(rank))
        state = {"parameters": rank.held_bytes, "optimizer": rank.state_bytes, "gradients": rank.reduced_bytes}
        host = state if rank.held.cpu_offload else {}
        if copies:
            host = {**host, "copy": state["parameters"] + state["optimizer"]}
        found.append(
            StageMemory(
                stages=tuple(rank.stages),
                in_flight=tuple(schedule.in_flight(number, stage) for stage in rank.stages),
                peak=max(moments, key=lambda moment: moment.total),
                host=host,
                moments=moments,
                parameters=sum(numel for _, numel in rank.shards),
            )
        )
    return tuple(found)


def _kind(stage: Stage, part: PartCount) -> str:
    return "loss" if part.name in stage.of_loss else "activations"
