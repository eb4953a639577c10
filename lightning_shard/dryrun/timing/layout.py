"""Estimates the time of a step from counts, layout, settings and device: arithmetic, and a simulation of the schedule.

Stages run in the schedule's order (``pipeline/schedules/simulate.py``); a receive begins when its rank
waits for it. After the last backward the optimizer reads gradients, and reads and writes its state and the parameters.

Not included: kernel launches, the host's own work, reading data, logging, norms and clipping, and slow ranks.

Beside the costs of its parts (``devices.py``), a stage takes *data* time: all-gathers of parameters and reduce-scatters
of gradients, as far as they don't overlap with computation. A unit is gathered while the previous one computes, and
reduced while the next one does; a link carries one of them at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from lightning_shard.arguments import seconds_text
from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR, Counts, ParameterCount
from lightning_shard.dryrun.memory.peak import Stage, Unit, shard_numel
from lightning_shard.dryrun.timing.devices import Groups, Links, Rates, Seconds
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.schedule import Action, Schedule
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

DATA, REPLICAS = "data", "replicas"


@dataclass(frozen=True)
class StageTime:
    """A rank's time on one stage, in seconds."""

    forward: Seconds  # a microbatch's, by purpose
    backward: Seconds
    weights: float  # of ``backward`` in its second part, which no rank waits for; 0 if that wasn't counted
    first: float  # what a batch's first forward takes in addition, to gather parameters that stay gathered
    last: float  # the same of the last backward before an optimizer step, to reduce gradients
    reduces: float  # the time to reduce gradients without overlapping computation; 0 if each backward reduces
    optimizer: float  # its step

    @cached_property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @cached_property
    def backward_s(self) -> float:
        return sum(self.backward.values())


class _Piece(NamedTuple):
    """One of a rank's consecutive tasks: compute a part, gather its unit before, and reduce it after; in seconds."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def _together(pieces: Sequence[_Piece]) -> float:
    """Time of consecutive pieces: gathers and reduces share one link, in parallel to computation."""
    computed = linked = 0.0
    gathered = linked = pieces[0].gather if pieces else 0.0
    for place, piece in enumerate(pieces):
        start = max(computed, gathered)
        computed = start + piece.compute
        following = pieces[place + 1].gather if place + 1 < len(pieces) else 0.0
        if following:
            gathered = linked = max(linked, start) + following
        if piece.reduce:
            linked = max(linked, computed) + piece.reduce
    return max(computed, linked)


def stage_time(stage: Stage, groups: Groups, rates: Rates, *, splits: bool = False) -> StageTime:
    """Estimate a stage's time; ``splits``: the schedule splits backwards, so reduces don't overlap with computation."""
    held = stage.held
    spent = [(rates.spent(cost.forward, groups), rates.spent(cost.backward, groups)) for cost in stage.costs]
    forwards, backwards = ([sum(of[way].values()) for of in spent] for way in (0, 1))
    units = dict(stage.units)
    in_turn = [units.pop(part.name, None) for part in stage.parts]  # a block that runs again is still gathered
    on_links = partial(_on_links, groups=groups, links=rates.links)
    (*gathers, gathers_root), (*reduces, reduces_root) = zip(*map(on_links, (*in_turn, stage.root)))

    def forward(gathering: bool, root: float = 0.0) -> float:
        pieces = [_Piece(c, g if gathering else 0.0) for c, g in zip(forwards, gathers)]
        return _together([_Piece(0.0, root), *pieces])

    def backward(gathering: bool, reducing: bool) -> float:
        each = zip(backwards, gathers, reduces)
        pieces = [_Piece(c, g if gathering else 0.0, r if reducing else 0.0) for c, g, r in each]
        pieces = [*reversed(pieces), _Piece(0.0, 0.0, reduces_root if reducing else 0.0)]
        return sum(map(sum, pieces)) if splits and reducing else _together(pieces)

    regathers, each = not stage.keeps_gathered, held.reduce_each_microbatch
    each_forward, each_backward = forward(regathers), backward(regathers, each)
    backward_s = total(of[1] for of in spent)
    return StageTime(
        forward={**total(of[0] for of in spent), DATA: max(0.0, each_forward - sum(forwards))},
        backward={**backward_s, DATA: max(0.0, each_backward - sum(backwards))},
        weights=sum(rates.of_weights(cost, groups) for cost in stage.costs),
        first=forward(True, gathers_root) - each_forward,
        last=0.0 if each else backward(regathers, True) - each_backward,
        reduces=0.0 if each else sum(reduces) + reduces_root,
        # its state and parameters are read and written, gradients are read
        optimizer=rates.read(2 * stage.state_bytes + 3 * stage.reduced_bytes),
    )


def total(spent: Iterable[Seconds]) -> dict[str, float]:
    found: dict[str, float] = {}
    for seconds in spent:
        for what, of in seconds.items():
            found[what] = found.get(what, 0.0) + of
    return found


def _on_links(unit: Unit | None, groups: Groups, links: Links) -> tuple[float, float]:
    """Time to gather a unit; and to reduce-scatter its gradients, and all-reduce the shards over replicas."""
    gather = reduce = shards = 0.0
    for each in unit.gathered_apart if unit is not None else ():
        group = groups.expert_shards if each.is_of_experts else groups.shards
        gather += links.gather(group, each.gathered)
        reduce += links.gather(group, each.reducing)
        shards += each.reducing / group.size
    return gather, reduce + links.reduce(groups.replicas, shards)


def sent(stage: Stage, layout: Layout, microbatches: int) -> dict[str, float]:
    """Bytes that a rank of a stage sends in a step, by axis; without pipeline transfers; of a batch's microbatches."""
    shards, experts = layout.shard_size, layout.shard_size // layout.expert_parallel_size
    replicas, batches = layout.data_parallel_replicas, stage.held.accumulates

    def over(unit: Unit) -> int:
        return experts if unit.is_of_experts else shards

    def gathered(units: Iterable[Unit]) -> float:
        return sum(each.gathered * (over(each) - 1) / over(each) for unit in units for each in unit.gathered_apart)

    runs = microbatches * batches
    gathers = batches if stage.keeps_gathered else 2 * runs
    reduces = runs if stage.held.reduce_each_microbatch else 1
    blocks, root = gathered(stage.units.values()), gathered([stage.root])
    gradients = [(each.reducing, over(each)) for unit in stage.every_unit for each in unit.gathered_apart]
    of_shards = sum(nbytes / size for nbytes, size in gradients)
    reduced = sum(nbytes * (size - 1) / size for nbytes, size in gradients)
    found: dict[str, float] = {
        DATA: gathers * blocks + batches * root + reduces * reduced,
        REPLICAS: reduces * of_shards * 2 * (replicas - 1) / replicas,
    }
    for axis in (TENSOR, EXPERT):
        works = (work for cost in stage.costs for work in (cost.forward, cost.backward))
        found[axis] = runs * sum(work.traffic.get(axis, 0) for work in works)
    return {axis: nbytes for axis, nbytes in found.items() if nbytes}


LEFT_OUT = "the time of kernel launches, data loading and host work is not included"
IDLE, OPTIMIZER, PIPELINE = "idle", "optimizer", "pipeline"


@dataclass(frozen=True)
class StepTime:
    """The estimated time of a step. Times are in seconds."""

    device: str  # the profile's name
    step: float  # from the first microbatch to the end of the optimizer's step
    timeline: Timeline  # of the pipeline's ranks, simulated, for the step's last batch
    optimizer: float  # the slowest rank's optimizer step
    bubble: float  # the fraction of the timeline in which the average rank computes nothing: it receives, or waits
    tokens_per_s: float  # of all devices together
    mfu: float | None
    """Model FLOPs utilization: the model's own operations (without recomputation) as a fraction of all devices' peak;
    ``None`` if these operations aren't known."""
    spent: Seconds  # the busiest rank's time in a step, by purpose; the rest is idle
    sent: Mapping[str, float]  # bytes that a rank sends in a step, by axis; the maximum over stages
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines. In seconds and bytes."""
        names = ("device", "step", "bubble", "tokens_per_s", "mfu", "dominates", "spent", "sent", "assumed")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.1f} % MFU"
        bubble = f", {100 * self.bubble:.1f} % bubble" if len(self.timeline.schedule.rows) > 1 else ""
        return f"a step on {self.device}: {seconds_text(self.step)}, {self.tokens_per_s:,.0f} tokens/s{mfu}{bubble}"

    @property
    def dominates(self) -> str:
        """What the busiest rank spends most time on."""
        return max(self.spent, key=lambda what: self.spent[what])


class Timing:
    """The costs of a step's actions, with a lower bound and a simulation of the step.

    Args:
        tied: (first stage, last stage, bytes of a rank's shard) of each weight that several stages have.
        microbatches: If it differs from the schedule's number: only for :meth:`bound`, not for :meth:`simulated`.
    """

    def __init__(
        self,
        schedule: Schedule,
        rates: Rates,
        groups: Groups,
        stages: Sequence[Stage],
        times: Sequence[StageTime],
        tied: Sequence[tuple[int, int, int]],
        *,
        microbatches: int | None = None,
    ) -> None:
        self.schedule, self.rates, self.stages = schedule, rates, tuple(times)
        self._groups, self._made = groups, stages
        self._microbatches, self._batches = microbatches or schedule.microbatches, stages[0].held.accumulates
        self._crossing = [stage.handed_on for stage in stages[:-1]]  # bytes of a microbatch over each cut
        self._own = [schedule.stages_of(rank) for rank in range(len(schedule.rows))]
        self.transfers = [self._transfer(cut, cut + 1, nbytes) for cut, nbytes in enumerate(self._crossing)]
        """Transfer time over each cut; 0 between stages of one rank."""
        self.optimizer = max(sum(self.stages[stage].optimizer for stage in own) for own in self._own)
        self.ties: float = sum(2 * self._transfer(first, last, nbytes) for first, last, nbytes in tied)
        """Time to sum gradients of weights that several stages have: to and fro between the outermost stages."""

    @classmethod
    def of(cls, stages: Sequence[Stage], schedule: Schedule, rates: Rates) -> Timing:
        """The timing of one plan."""
        groups = Groups(stages[0].layout, rates.device.per_machine)
        times = [stage_time(stage, groups, rates, splits=schedule.splits_backwards) for stage in stages]
        tied = ties(stages[0].counts, stages[0].layout, [stage.blocks for stage in stages])
        return cls(schedule, rates, groups, stages, times, tied)

    def _transfer(self, one: int, other: int, nbytes: int) -> float:
        """Time to send bytes from one stage to another; 0 between stages of one rank."""
        ranks = self.schedule.rank_of[one], self.schedule.rank_of[other]
        return self.rates.links.transfer(self._groups.between(*ranks), nbytes) if len({*ranks}) > 1 else 0.0

    def costs(self, *, reduces: bool = True) -> Costs:
        """The costs of a batch's actions; it ``reduces`` gradients if it is the last before an optimizer step."""
        once = {Action(index, "F", 0): stage.first for index, stage in enumerate(self.stages)}
        if reduces:
            for rank, row in enumerate(self.schedule.rows):
                once[row[-1]] = sum(self._last(rank).values())
        return Costs(
            [stage.forward_s for stage in self.stages],
            [stage.backward_s - stage.weights for stage in self.stages],
            [stage.weights for stage in self.stages],
            self.transfers,
            once,
            receives_late=True,
        )

    def _last(self, rank: int) -> dict[int, float]:
        """Additional time of a rank's last action, by stage: the other stages' gradients are reduced after it."""
        row = self.schedule.rows[rank]
        beside = None if self.schedule.splits_backwards else row[-1].stage
        return {s: self.stages[s].last if s == beside else self.stages[s].reduces for s in self._own[rank]}

    def bound(self) -> float:
        """A lower bound of the step's time, for any order of the schedule's actions."""
        return (self._batches - 1) * self._bound(0) + self._bound(1) + self.optimizer + self.ties

    def _bound(self, reduces: int) -> float:
        """A lower bound of a batch's time: a rank computes all microbatches, and receives what they need.

        Before that, the first microbatch passes the earlier stages. After it, the last gradients pass them, unless the
        rank's last actions are gradients of weights.
        """
        costs = self.costs(reduces=bool(reduces))
        splits, several = self.schedule.splits_backwards, self.schedule.stages > len(self.schedule.rows)
        transfers = [*self.transfers, 0.0]
        passing, longest = 0.0, 0.0
        passed = []
        for index, stage in enumerate(self.stages):
            received = transfers[index - 1] if index else 0.0  # the rank's own receive is counted with each microbatch
            passed.append(passing - received)
            passing += costs.forward[index] + transfers[index]
            if not splits:
                passing += costs.backward_input[index] + costs.backward_weight[index] + transfers[index]
                passing += 0.0 if several else stage.first + reduces * stage.last
        for rank, own in enumerate(self._own):
            each = sum(costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s] for s in own)
            each += sum(transfers[s] for s in own) + sum(transfers[s - 1] for s in own if s)
            once = sum(self.stages[s].first for s in own) + reduces * sum(self._last(rank).values())
            longest = max(longest, self._microbatches * each + once + passed[own[0]])
        return longest

    def simulated(self, flops_per_sample: float | None = None) -> StepTime:
        """Simulate the step; for MFU, given the whole model's operations for one sample (see :func:`model_flops`)."""
        counts, layout, batches = self._made[0].counts, self._groups.layout, self._batches
        timeline = simulate(self.schedule, self.costs())
        before = simulate(self.schedule, self.costs(reduces=False)).duration if batches > 1 else 0.0
        step = (batches - 1) * before + timeline.duration + self.optimizer + self.ties
        runs = self._microbatches * batches
        times = runs * layout.data_parallel_size
        flops = None if flops_per_sample is None else flops_per_sample * counts.samples * times
        bytes_sent = []
        for own in self._own:
            crossing = sum(self._crossing[cut] for stage in own for cut in self._cuts_of(stage) if self.transfers[cut])
            of_stages = [sent(self._made[stage], layout, self._microbatches) for stage in own]
            # activations forward over one of a stage's cuts, gradients backward over the other
            bytes_sent.append(total([*of_stages, *([{PIPELINE: runs * crossing}] if crossing else [])]))
        axes = dict.fromkeys(axis for of in bytes_sent for axis in of)
        return StepTime(
            device=self.rates.device.name,
            step=step,
            timeline=timeline,
            optimizer=self.optimizer,
            bubble=timeline.bubble,
            tokens_per_s=counts.tokens * times / step if step else float("inf"),
            mfu=None if flops is None or not step else flops / (step * layout.world_size * self.rates.peak),
            spent=self._spent(step),
            sent={axis: max(of.get(axis, 0.0) for of in bytes_sent) for axis in axes},
            assumed=(*self.rates.device.assumptions, *counts.assumed, LEFT_OUT),
        )

    def _cuts_of(self, stage: int) -> range:
        """The cuts before and after a stage."""
        return range(max(0, stage - 1), min(stage + 1, len(self._crossing)))

    def _spent(self, step: float) -> dict[str, float]:
        """The busiest rank's time in a step, by purpose."""
        runs = self._microbatches * self._batches
        ranks = []
        for rank, own in enumerate(self._own):
            times = [self.stages[stage] for stage in own]
            found = total(
                [
                    *({what: runs * of for what, of in stage.forward.items()} for stage in times),
                    *({what: runs * of for what, of in stage.backward.items()} for stage in times),
                    {DATA: sum(self._batches * s.first for s in times) + sum(self._last(rank).values())},
                    {OPTIMIZER: sum(stage.optimizer for stage in times)},
                ]
            )
            ranks.append(found)
        busiest = max(ranks, key=lambda found: sum(found.values()))
        busiest[IDLE] = max(0.0, step - sum(busiest.values()))
        return busiest


def model_flops(counts: Counts) -> float:
    """FLOPs of the model's forward and backward for one sample; ``counts`` must be without tensor and expert axes."""
    parts = [*counts.blocks, *(part for _, part in counts.parts), *counts.everywhere, counts.loss]
    return sum(part.plain.forward.flops + part.plain.backward.flops for part in parts) / counts.samples


def ties(counts: Counts, layout: Layout, blocks: Sequence[range]) -> list[tuple[int, int, int]]:
    """The trained weights that several stages have: (first stage, last stage, bytes of a rank's shard)."""
    holders: dict[str, list[tuple[int, ParameterCount]]] = {}
    for index, own in enumerate(blocks):
        held = {p.name: p for part in counts.of_stage(own) for p in part.parameters if p.requires_grad}
        for name, parameter in held.items():
            holders.setdefault(name, []).append((index, parameter))
    shared = [(found[0][0], found[-1][0], found[0][1]) for found in holders.values() if len(found) > 1]
    return [(one, other, shard_numel(p, layout.shard_size) * p.dtype.itemsize) for one, other, p in shared]


def share_text(time: StepTime) -> str:
    """A text of the busiest device's shares of time by purpose, the largest first."""
    shares = sorted(((of / time.step, what) for what, of in time.spent.items() if time.step), reverse=True)
    return ", ".join(f"{what} {100 * share:.1f} %" for share, what in shares if share >= 0.0005)
