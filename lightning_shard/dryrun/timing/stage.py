"""How long a rank spends on one stage: a forward and a backward of a microbatch, and what a batch takes beside.

Beside what its parts cost (``rates.py``) a rank spends *data*: parameters that are gathered and gradients that are
reduced, as far as they don't go on beside computation. A unit is gathered while the one before it computes, and reduced
while the next one does; one after the other on a link. With ``cpu_offload``, its shards are copied from the host's
memory before it is gathered, and those of its gradients to there after they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR
from lightning_shard.dryrun.memory.peak import Held, Stage, Unit
from lightning_shard.dryrun.timing.links import Groups
from lightning_shard.dryrun.timing.rates import Rates, Seconds
from lightning_shard.layout import Layout

DATA, REPLICAS = "data", "replicas"


@dataclass(frozen=True)
class StageTime:
    """What a rank of one stage spends; seconds.

    Attributes:
        forward: On a microbatch, by what.
        backward: The same.
        weights: What of ``backward`` comes in its second part, which nobody waits for; 0 where that wasn't counted.
        first: What the first forward of a batch takes beside: what is gathered then stays so.
        last: What the last backward before an optimizer step takes beside, to reduce gradients.
        reduces: What that takes when nothing is left to compute beside it; 0 if each backward reduces.
        optimizer: The optimizer's step; 0 where that is in the host's memory, which isn't known.
    """

    forward: Seconds
    backward: Seconds
    weights: float
    first: float
    last: float
    reduces: float
    optimizer: float

    @cached_property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @cached_property
    def backward_s(self) -> float:
        return sum(self.backward.values())


class Turns(NamedTuple):
    """How often things happen in a step: microbatches of a batch, and batches."""

    microbatches: int
    batches: int


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


def stage_time(
    stage: Stage, samples: int, held: Held, groups: Groups, rates: Rates, *, splits: bool = False
) -> StageTime:
    """Of a stage.

    Args:
        samples: Of the microbatch that was counted.
        splits: Whether backwards of the pipeline come in two parts: then none reduces beside what it computes.
    """
    pairs = zip(stage.parts, stage.costs, strict=True)
    spent = [rates.of_part(part, cost, groups, samples) for part, cost in pairs]
    forwards, backwards = ([sum(of[way].values()) for of in spent] for way in (0, 1))
    units = _units_in_turn(stage)
    offloads = held.cpu_offload
    *gathers, gathers_root = (_gather(unit, groups, rates, offloads) for unit in (*units, stage.root))
    *reduces, reduces_root = (_reduce(unit, groups, rates, offloads) for unit in (*units, stage.root))

    def forward(gathering: bool, root: float = 0.0) -> float:
        pieces = [_Piece(c, g if gathering else 0.0) for c, g in zip(forwards, gathers)]
        return _together([_Piece(0.0, root), *pieces], overlaps=rates.overlaps)

    def backward(gathering: bool, reducing: bool) -> float:
        pieces = [
            _Piece(c, g if gathering else 0.0, r if reducing else 0.0) for c, g, r in zip(backwards, gathers, reduces)
        ]
        last = _Piece(0.0, 0.0, reduces_root if reducing else 0.0)
        return _together([*reversed(pieces), last], overlaps=rates.overlaps and not (splits and reducing))

    regathers, each = not stage.keeps_gathered, held.reduce_each_microbatch
    each_forward, each_backward = forward(regathers), backward(regathers, each)
    backward_s = total(of[1] for of in spent)
    later = (rates.of_weights(part, cost, groups, samples) for part, cost in zip(stage.parts, stage.costs))
    return StageTime(
        forward={**total(of[0] for of in spent), DATA: max(0.0, each_forward - sum(forwards))},
        backward={**backward_s, DATA: max(0.0, each_backward - sum(backwards))},
        weights=sum(later),
        first=forward(True, gathers_root) - each_forward,
        last=0.0 if each else backward(regathers, True) - each_backward,
        reduces=0.0 if each else sum(reduces) + reduces_root,
        optimizer=0.0 if offloads else rates.read(_stepped(stage)),
    )


def total(spent: Iterable[Seconds]) -> dict[str, float]:
    found: dict[str, float] = {}
    for seconds in spent:
        for what, of in seconds.items():
            found[what] = found.get(what, 0.0) + of
    return found


def _units_in_turn(stage: Stage) -> list[Unit | None]:
    """For each part the unit that is gathered for it: once, where a block runs several times."""
    units = dict(stage.units)
    return [units.pop(part.name, None) for part in stage.parts]


def _of_unit(unit: Unit, *, gradients: bool) -> tuple[float, float]:
    """Bytes of whole parameters or gradients of a unit, that all data ranks share, and that those of experts do."""
    shared = experts = 0.0
    for parameter, numel in unit.padded:
        if parameter.is_listed or (gradients and not parameter.requires_grad):
            continue  # experts in lists are among what their part sends
        dtype = (unit.reduces_in if gradients else parameter.gathered_dtype) or parameter.dtype
        nbytes = numel * dtype.itemsize
        if parameter.is_expert:
            experts += nbytes * unit.expert_shards
        else:
            shared += nbytes * unit.shards
    return shared, experts


def _gather(unit: Unit | None, groups: Groups, rates: Rates, offloads: bool) -> float:
    if unit is None:
        return 0.0
    shared, experts = _of_unit(unit, gradients=False)
    copied = rates.to_host(unit.held) if offloads else 0.0
    return copied + rates.links.gather(groups.shards, shared) + rates.links.gather(groups.expert_shards, experts)


def _reduce(unit: Unit | None, groups: Groups, rates: Rates, offloads: bool) -> float:
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
        + (rates.to_host(unit.reduced) if offloads else 0.0)
    )


def _stepped(stage: Stage) -> float:
    """Bytes that an optimizer's step reads and writes: state and parameters twice, gradients once."""
    trained = sum(numel * p.dtype.itemsize for p, numel in stage.shards if p.requires_grad)
    return 2 * stage.state_bytes + 3 * trained


def sent(stage: Stage, held: Held, layout: Layout, turns: Turns) -> dict[str, float]:
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
