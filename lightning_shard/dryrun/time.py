"""How long a step takes: counts × layout × settings × device. Pure arithmetic, and the schedule's own order on a clock.

Of each part, forward and backward, a rank spends

* *products*: matrix products, convolutions and attention, at the device's peak or its memory's bandwidth, whichever is
  slower (a roofline);
* *memory*: other operations, each reading what it is given and writing what it makes;
* *tensor*, *expert*: what its axis sends, which the computation waits for;
* *data*: parameters that are gathered and gradients that are reduced, as far as they don't go on beside computation. A
  unit is gathered while the one before it computes, and reduced while the next one does; one after the other on a
  link.

Stages then run in the schedule's order (``pipeline/simulate.py``): a receive begins when its rank asks for it. After
the last backward the optimizer reads gradients, and reads and writes its state and the parameters.

Not counted: launching kernels, the host's own work, reading data, logging, norms and clipping, and slow ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lightning_shard.dryrun.counts import EXPERT, TENSOR, Cost, Counts, ParameterCount, PartCount, Work
from lightning_shard.dryrun.devices import Device
from lightning_shard.dryrun.links import Groups, Links
from lightning_shard.dryrun.memory import Held, Stage, Unit, shard_numel
from lightning_shard.dryrun.optimizer import OptimizerState
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedule import Action, Schedule
from lightning_shard.pipeline.simulate import Costs, Timeline, simulate

PRODUCTS, MEMORY, DATA, IDLE, OPTIMIZER = "products", "memory", "data", "idle", "optimizer"
REPLICAS, PIPELINE = "replicas", "pipeline"

Seconds = Mapping[str, float]
"""By what they are spent on."""


@dataclass(frozen=True)
class Measured:
    """What parts took on the device at hand, instead of what a profile says.

    Attributes:
        seconds: Of a forward and of a backward of each part, by its name, for microbatches of ``samples``.
        device: Where.
    """

    seconds: Mapping[str, tuple[float, float]]
    samples: int
    device: str


class Rates:
    """What work costs on a device.

    Args:
        dtype: Of matrix products.
        measured: In place of the profile's peaks, where a part was measured.
        overlaps: Whether gathering and reducing go on beside computation; gloo's do not.
    """

    def __init__(self, device: Device, dtype: str, *, measured: Measured | None = None, overlaps: bool = True) -> None:
        self.device = device
        self.links = Links(device)
        self.overlaps = overlaps
        self.measured = measured
        self.peak = device.peak(dtype)
        self._products = self.peak * device.achieved.compute
        self._memory = device.memory_bandwidth * device.achieved.memory

    def read(self, nbytes: float) -> float:
        return nbytes / self._memory

    def spent(self, work: Work, groups: Groups) -> dict[str, float]:
        products = max(work.flops / self._products, self.read(work.moved - work.beside))
        return {PRODUCTS: products, MEMORY: self.read(work.beside), **self._sent(work, groups)}

    def of_part(self, part: PartCount, cost: Cost, groups: Groups, samples: int) -> tuple[Seconds, Seconds]:
        """A forward and a backward; measured ones with what was counted to be sent."""
        forward, backward = cost.forward, cost.backward
        known = self.measured.seconds.get(part.name) if self.measured is not None else None
        if known is None:
            return self.spent(forward, groups), self.spent(backward, groups)
        assert self.measured is not None
        scale = samples / self.measured.samples
        forward_s, backward_s = (scale * seconds for seconds in known)
        if cost is not part.plain and part.plain.backward.flops:
            again = max(0, backward.flops - part.plain.backward.flops) / max(1, part.plain.forward.flops)
            backward_s += again * forward_s
        return (
            {PRODUCTS: forward_s, **self._sent(forward, groups)},
            {PRODUCTS: backward_s, **self._sent(backward, groups)},
        )

    def _sent(self, work: Work, groups: Groups) -> dict[str, float]:
        found = {}
        if work.traffic.get(TENSOR):
            found[TENSOR] = self.links.ring(groups.tensor, work.traffic[TENSOR], work.collectives.get(TENSOR, 1))
        if work.traffic.get(EXPERT):
            found[EXPERT] = self.links.exchange(groups.expert, work.traffic[EXPERT], work.collectives.get(EXPERT, 1))
        return found


class _Piece(NamedTuple):
    """What a rank does in turn: compute a part, for which a unit is gathered before and reduced after."""

    compute: float
    gather: float = 0.0
    reduce: float = 0.0


def _together(pieces: Sequence[_Piece], *, overlaps: bool) -> float:
    """Seconds of pieces in turn, what they gather and reduce beside them on a link of their own."""
    if not overlaps:
        return sum(map(sum, pieces))
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


@dataclass(frozen=True)
class StageTime:
    """What a rank of one stage spends; seconds.

    Attributes:
        forward: On a microbatch, by what.
        backward: The same.
        weights: What of ``backward`` is the gradients of weights alone, which nobody waits for.
        first: What the first forward of a batch takes beside: what is gathered then stays so.
        last: What the last backward before an optimizer step takes beside, to reduce gradients.
        optimizer: The optimizer's step.
    """

    forward: Seconds
    backward: Seconds
    weights: float
    first: float
    last: float
    optimizer: float

    @cached_property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @cached_property
    def backward_s(self) -> float:
        return sum(self.backward.values())


class _Turns(NamedTuple):
    """How often things happen in a step: microbatches of a batch, and batches."""

    microbatches: int
    batches: int


def stage_time(stage: Stage, samples: int, held: Held, groups: Groups, rates: Rates) -> StageTime:
    """Of a stage.

    Args:
        samples: Of the microbatch that was counted.
    """
    pairs = zip(stage.parts, stage.costs, strict=True)
    spent = [rates.of_part(part, cost, groups, samples) for part, cost in pairs]
    forwards, backwards = ([sum(of[way].values()) for of in spent] for way in (0, 1))
    units = _units_in_turn(stage)
    gathers, reduces = [_gather(unit, groups, rates) for unit in units], [_reduce(u, groups, rates) for u in units]
    gathers_root, reduces_root = _gather(stage.root, groups, rates), _reduce(stage.root, groups, rates)

    def forward(gathering: bool, root: float = 0.0) -> float:
        pieces = [_Piece(c, g if gathering else 0.0) for c, g in zip(forwards, gathers)]
        return _together([_Piece(0.0, root), *pieces], overlaps=rates.overlaps)

    def backward(gathering: bool, reducing: bool) -> float:
        pieces = [
            _Piece(c, g if gathering else 0.0, r if reducing else 0.0) for c, g, r in zip(backwards, gathers, reduces)
        ]
        last = _Piece(0.0, 0.0, reduces_root if reducing else 0.0)
        return _together([*reversed(pieces), last], overlaps=rates.overlaps)

    regathers, each = not stage.keeps_gathered, held.reduce_each_microbatch
    each_forward, each_backward = forward(regathers), backward(regathers, each)
    backward_s = _total(of[1] for of in spent)
    own = backward_s.get(PRODUCTS, 0.0) + backward_s.get(MEMORY, 0.0)
    plain, run = (sum(cost.backward.flops for cost in costs) for costs in ([p.plain for p in stage.parts], stage.costs))
    return StageTime(
        forward={**_total(of[0] for of in spent), DATA: max(0.0, each_forward - sum(forwards))},
        backward={**backward_s, DATA: max(0.0, each_backward - sum(backwards))},
        weights=0.5 * own * (plain / run if run else 1.0),
        first=forward(True, gathers_root) - each_forward,
        last=0.0 if each else backward(regathers, True) - each_backward,
        optimizer=rates.read(_stepped(stage)),
    )


def _total(spent: Iterable[Seconds]) -> dict[str, float]:
    found: dict[str, float] = {}
    for seconds in spent:
        for what, of in seconds.items():
            found[what] = found.get(what, 0.0) + of
    return found


def _units_in_turn(stage: Stage) -> list[Unit | None]:
    """For each part the unit that is gathered for it: once, where a block runs several times."""
    units = [stage.units.get(part.name) for part in stage.parts]
    return [unit if unit not in units[:place] else None for place, unit in enumerate(units)]


def _of_unit(unit: Unit, *, gradients: bool) -> tuple[float, float]:
    """Bytes of whole parameters or gradients of a unit, that all data ranks share, and that those of experts do."""
    shared = experts = 0.0
    for parameter, numel in unit.padded:
        if gradients and not parameter.requires_grad:
            continue
        dtype = (unit.reduces_in if gradients else parameter.gathered_dtype) or parameter.dtype
        nbytes = numel * dtype.itemsize
        if parameter.is_expert:
            experts += nbytes * unit.expert_shards
        else:
            shared += nbytes * unit.shards
    return shared, experts


def _gather(unit: Unit | None, groups: Groups, rates: Rates) -> float:
    if unit is None:
        return 0.0
    shared, experts = _of_unit(unit, gradients=False)
    return rates.links.gather(groups.shards, shared) + rates.links.gather(groups.expert_shards, experts)


def _reduce(unit: Unit | None, groups: Groups, rates: Rates) -> float:
    """Reduced to shards, and these over replicas."""
    if unit is None:
        return 0.0
    shared, experts = _of_unit(unit, gradients=True)
    links = rates.links
    shards = shared / groups.shards.size + experts / groups.expert_shards.size
    return (
        links.gather(groups.shards, shared)
        + links.gather(groups.expert_shards, experts)
        + links.reduce(groups.replicas, shards)
    )


def _stepped(stage: Stage) -> float:
    """Bytes that an optimizer's step reads and writes: state and parameters twice, gradients once."""
    trained = sum(numel * p.dtype.itemsize for p, numel in stage.shards if p.requires_grad)
    return 2 * stage.state_bytes + 3 * trained


def _sent(stage: Stage, held: Held, layout: Layout, turns: _Turns) -> dict[str, float]:
    """Bytes that a rank sends in a step, by axis."""
    shards, experts = layout.shard_size, layout.shard_size // layout.expert_parallel_size
    replicas = layout.data_parallel_replicas

    def ring(sizes: tuple[float, float]) -> float:
        return sizes[0] * (shards - 1) / shards + sizes[1] * (experts - 1) / experts

    runs = turns.microbatches * turns.batches
    gathers = turns.batches if stage.keeps_gathered else 2 * runs
    reduces = runs if held.reduce_each_microbatch else 1
    units = [unit for unit in _units_in_turn(stage) if unit is not None]
    blocks = sum(ring(_of_unit(unit, gradients=False)) for unit in units)
    root = ring(_of_unit(stage.root, gradients=False))
    gradients = [_of_unit(unit, gradients=True) for unit in (*units, stage.root)]
    of_shards = sum(shared / shards + expert / experts for shared, expert in gradients)
    found: dict[str, float] = {
        DATA: gathers * blocks + turns.batches * root + reduces * sum(map(ring, gradients)),
        REPLICAS: reduces * of_shards * 2 * (replicas - 1) / replicas,
    }
    for axis in (TENSOR, EXPERT):
        works = (work for cost in stage.costs for work in (cost.forward, cost.backward))
        found[axis] = runs * sum(work.traffic.get(axis, 0) for work in works)
    return {axis: nbytes for axis, nbytes in found.items() if nbytes}


@dataclass(frozen=True)
class StepTime:
    """A step on a clock; seconds.

    Attributes:
        device: The profile's name.
        step: From the first microbatch to the end of the optimizer's step.
        timeline: Of the last batch of the step, in seconds; of the pipeline's ranks.
        stages: What each spends.
        optimizer: The slowest rank's.
        ties: What weights of several stages take, whose gradients are added after the last backward.
        bubble: The share of the step in which the mean rank computes and sends nothing.
        tokens_per_s: Of all devices together.
        mfu: The share of all devices' peak that the model's own operations are (recomputation counts nothing); ``None``
            where these aren't known.
        spent: What the busiest rank spends a step on, by what; what is left is idle.
        sent: Bytes that a rank sends in a step, by axis: the most of any stage's.
        unknown: What isn't in these numbers and should be.
        assumed: What they were taken for.
    """

    device: str
    step: float
    timeline: Timeline
    stages: tuple[StageTime, ...]
    optimizer: float
    ties: float
    bubble: float
    tokens_per_s: float
    mfu: float | None
    spent: Seconds
    sent: Mapping[str, float]
    unknown: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For machines: seconds and bytes."""
        return {
            "device": self.device,
            "step": self.step,
            "bubble": self.bubble,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "dominates": self.dominates,
            "spent": dict(self.spent),
            "sent": dict(self.sent),
            "assumed": list(self.assumed),
            "unknown": list(self.unknown),
        }

    def __str__(self) -> str:
        mfu = "" if self.mfu is None else f", {100 * self.mfu:.1f} % MFU"
        bubble = f", {100 * self.bubble:.1f} % bubble" if len(self.timeline.schedule.rows) > 1 else ""
        return f"a step on {self.device}: {self.step:.3g} s, {self.tokens_per_s:,.0f} tokens/s{mfu}{bubble}"

    @property
    def dominates(self) -> str:
        """What the busiest rank spends most on."""
        return max(self.spent, key=lambda what: self.spent[what])


class Timing:
    """The costs of a step's actions: made once, bounded from below, and simulated.

    Args:
        counts: Of one microbatch, for the layout's tensor and expert axes.
        stages: In the order of the network.
        times: What each spends.
        crossing: Bytes of a microbatch that cross each cut.
        tied: Bytes of a rank's shards of weights that several stages have, with the first and the last of these.
    """

    def __init__(
        self,
        counts: Counts,
        layout: Layout,
        schedule: Schedule,
        held: Held,
        rates: Rates,
        groups: Groups,
        stages: Sequence[Stage],
        times: Sequence[StageTime],
        crossing: Sequence[int],
        tied: Sequence[tuple[int, int, int]],
    ) -> None:
        self.counts, self.layout, self.schedule, self.held, self.rates = counts, layout, schedule, held, rates
        self._groups = groups
        self._turns = _Turns(schedule.microbatches, held.accumulates)
        self._made = stages
        self.stages = tuple(times)
        self._crossing = crossing
        self._tied = tied
        self._own: list[list[int]] = [[] for _ in schedule.rows]
        for stage in range(schedule.stages):
            self._own[schedule.rank_of[stage]].append(stage)

    @classmethod
    def of(
        cls,
        counts: Counts,
        layout: Layout,
        blocks: Sequence[range],
        schedule: Schedule,
        held: Held,
        rates: Rates,
        optimizer: OptimizerState | None = None,
    ) -> Timing:
        """Of one plan.

        Args:
            blocks: Each stage's.
            optimizer: What is kept for parameters; ``None`` where that isn't known.
        """
        groups = Groups(layout, rates.device.per_machine)
        stages = [Stage(counts, layout, own, held, optimizer) for own in blocks]
        times = [stage_time(stage, counts.samples, held, groups, rates) for stage in stages]
        crossing, tied = crossings(counts, blocks), ties(counts, layout, blocks)
        return cls(counts, layout, schedule, held, rates, groups, stages, times, crossing, tied)

    @cached_property
    def transfers(self) -> list[float]:
        """Over each cut; 0 between stages of one rank."""
        holder = self.schedule.rank_of
        pairs = [(holder[cut], holder[cut + 1]) for cut in range(len(self._crossing))]
        return [
            self.rates.links.transfer(self._groups.between(one, other), nbytes) if one != other else 0.0
            for (one, other), nbytes in zip(pairs, self._crossing)
        ]

    def costs(self, *, reduces: bool = True) -> Costs:
        """Of a batch's actions.

        Args:
            reduces: Whether its last backward is the last before an optimizer step.
        """
        backward = [(stage.backward_s - stage.weights, stage.weights) for stage in self.stages]
        once = {Action(index, "F", 0): stage.first for index, stage in enumerate(self.stages)}
        if reduces:
            for row, own in zip(self.schedule.rows, self._own):
                once[row[-1]] = sum(self.stages[stage].last for stage in own)
        return Costs(
            [stage.forward_s for stage in self.stages],
            [inputs for inputs, _ in backward],
            [weights for _, weights in backward],
            self.transfers,
            once,
            receives_late=True,
        )

    @cached_property
    def optimizer(self) -> float:
        return max(sum(self.stages[stage].optimizer for stage in own) for own in self._own)

    @cached_property
    def ties(self) -> float:
        """To add the gradients of weights that several stages have, to and fro between the outermost ones."""
        found = 0.0
        for first, last, nbytes in self._tied:
            one, other = self.schedule.rank_of[first], self.schedule.rank_of[last]
            if one != other:
                found += 2 * self.rates.links.transfer(self._groups.between(one, other), nbytes)
        return found

    def bound(self) -> float:
        """What no order of a schedule's actions can go below."""
        batches = self._turns.batches
        return (batches - 1) * self._bound(0) + self._bound(1) + self.optimizer + self.ties

    def _bound(self, reduces: int) -> float:
        """Of a batch: a rank computes all microbatches, and receives what they need.

        Before that, the first one has passed the stages before; after it, the last gradients have yet to, unless what
        the rank does last are gradients of weights.
        """
        costs = self.costs(reduces=bool(reduces))
        splits, several = self.schedule.splits_backwards, self.schedule.stages > len(self.schedule.rows)
        transfers = [*self.transfers, 0.0]
        passing, longest = 0.0, 0.0
        passed = []
        for index, stage in enumerate(self.stages):
            received = transfers[index - 1] if index else 0.0  # the rank's own, counted with what it does for each
            passed.append(passing - received)
            passing += costs.forward[index] + transfers[index]
            if not splits:
                passing += costs.backward_input[index] + costs.backward_weight[index] + transfers[index]
                passing += 0.0 if several else stage.first + reduces * stage.last
        for own in self._own:
            each = sum(costs.forward[s] + costs.backward_input[s] + costs.backward_weight[s] for s in own)
            each += sum(transfers[s] for s in own) + sum(transfers[s - 1] for s in own if s)
            once = sum(self.stages[s].first + reduces * self.stages[s].last for s in own)
            longest = max(longest, self._turns.microbatches * each + once + passed[own[0]])
        return longest

    def simulated(self, flops_per_sample: float | None = None) -> StepTime:
        """The step on a clock.

        Args:
            flops_per_sample: Of the model itself, forward and backward; on one device, without recomputation.
        """
        counts, layout, batches = self.counts, self.layout, self._turns.batches
        timeline = simulate(self.schedule, self.costs())
        before = simulate(self.schedule, self.costs(reduces=False)).duration if batches > 1 else 0.0
        step = (batches - 1) * before + timeline.duration + self.optimizer + self.ties
        times = self._turns.microbatches * batches * layout.data_parallel_size
        flops = None if flops_per_sample is None else flops_per_sample * counts.samples * times
        sent = [_sent(stage, self.held, layout, self._turns) for stage in self._made]
        runs = self._turns.microbatches * batches
        for cut, (transfer, nbytes) in enumerate(zip(self.transfers, self._crossing)):
            for end in (cut, cut + 1):  # values one way, gradients the other
                if transfer:
                    sent[end][PIPELINE] = sent[end].get(PIPELINE, 0.0) + runs * nbytes
        return StepTime(
            device=self.rates.device.name,
            step=step,
            timeline=timeline,
            stages=self.stages,
            optimizer=self.optimizer,
            ties=self.ties,
            bubble=timeline.bubble,
            tokens_per_s=counts.tokens * times / step if step else float("inf"),
            mfu=None if flops is None or not step else flops / (step * layout.world_size * self.rates.peak),
            spent=self._spent(step),
            sent={axis: max(of.get(axis, 0.0) for of in sent) for axis in dict.fromkeys(a for of in sent for a in of)},
            unknown=self._unknown(),
            assumed=(*self.rates.device.assumptions, *counts.assumed),
        )

    def _spent(self, step: float) -> dict[str, float]:
        """The busiest rank's step, by what."""
        runs = self._turns.microbatches * self._turns.batches
        ranks = []
        for own in self._own:
            times = [self.stages[stage] for stage in own]
            found = _total(
                [
                    *({what: runs * of for what, of in stage.forward.items()} for stage in times),
                    *({what: runs * of for what, of in stage.backward.items()} for stage in times),
                    {DATA: sum(self._turns.batches * stage.first + stage.last for stage in times)},
                    {OPTIMIZER: sum(stage.optimizer for stage in times)},
                ]
            )
            ranks.append(found)
        busiest = max(ranks, key=lambda found: sum(found.values()))
        busiest[IDLE] = max(0.0, step - sum(busiest.values()))
        return busiest

    def _unknown(self) -> tuple[str, ...]:
        found = []
        if not self._made[0].knows_optimizer:
            found.append("the optimizer's state, which its step reads and writes")
        if self.held.cpu_offload:
            found.append("copies to and from the host's memory, and the optimizer's step there")
        return tuple(found)


def model_flops(counts: Counts) -> float:
    """Of the model itself, for one sample, forward and backward: of counts without tensor and expert axes."""
    parts = [*counts.blocks, *(part for _, part in counts.parts), *counts.everywhere, counts.loss]
    return sum(part.plain.forward.flops + part.plain.backward.flops for part in parts) / counts.samples


def dtype_of(precision: str) -> str:
    """In which matrix products are computed, under a Trainer's precision."""
    kinds = {"bf16": "bfloat16", "16": "float16", "64": "float64"}
    return kinds.get(precision.partition("-")[0], "float32")


def share_text(time: StepTime) -> str:
    """What the busiest device spends its step on, the most first."""
    shares = sorted(((of / time.step, what) for what, of in time.spent.items() if time.step), reverse=True)
    return ", ".join(f"{what} {100 * share:.1f} %" for share, what in shares if share >= 0.0005)


def crossings(counts: Counts, blocks: Sequence[range]) -> list[int]:
    """Bytes of a microbatch that cross each cut."""
    return [counts.blocks[own.start - 1].output for own in blocks[1:]]


def ties(counts: Counts, layout: Layout, blocks: Sequence[range]) -> list[tuple[int, int, int]]:
    """The weights of several stages: the first and the last of these, and bytes of a rank's shard."""
    holders: dict[str, list[tuple[int, ParameterCount]]] = {}
    for index, own in enumerate(blocks):
        held = {p.name: p for part in counts.of_stage(own) for p in part.parameters if p.requires_grad}
        for name, parameter in held.items():
            holders.setdefault(name, []).append((index, parameter))
    return [
        (found[0][0], found[-1][0], shard_numel(parameter, layout.shard_size) * parameter.dtype.itemsize)
        for found in holders.values()
        if len(found) > 1
        for parameter in (found[0][1],)
    ]
