"""Estimates a rank's time on one stage: forward and backward of a microbatch, and additional time per batch.

Beside the costs of its parts (``rates.py``), a stage takes *data* time: all-gathers of parameters and reduce-scatters
of gradients, as far as they don't overlap with computation. A unit is gathered while the previous one computes, and
reduced while the next one does; a link carries one of them at a time. With ``cpu_offload``, a unit's shards are copied
from host memory before it is gathered, and shards of its gradients are copied back after they are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR
from lightning_shard.dryrun.memory.peak import Stage, Unit
from lightning_shard.dryrun.timing.links import Groups
from lightning_shard.dryrun.timing.rates import Rates, Seconds
from lightning_shard.layout import Layout

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
    optimizer: float  # its step; 0 if it runs in host memory, where its time isn't known

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


def _together(pieces: Sequence[_Piece], *, overlaps: bool) -> float:
    """Time of consecutive pieces; if ``overlaps``, gathers and reduces share one link, in parallel to computation."""
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


def stage_time(stage: Stage, groups: Groups, rates: Rates, *, splits: bool = False) -> StageTime:
    """Estimate a stage's time; ``splits``: the schedule splits backwards, so reduces don't overlap with computation."""
    held = stage.held
    spent = [(rates.spent(cost.forward, groups), rates.spent(cost.backward, groups)) for cost in stage.costs]
    forwards, backwards = ([sum(of[way].values()) for of in spent] for way in (0, 1))
    units = dict(stage.units)
    in_turn = [units.pop(part.name, None) for part in stage.parts]  # a block that runs again is still gathered
    on_links = partial(_on_links, groups=groups, rates=rates, offloads=held.cpu_offload)
    (*gathers, gathers_root), (*reduces, reduces_root) = zip(*map(on_links, (*in_turn, stage.root)))

    def forward(gathering: bool, root: float = 0.0) -> float:
        pieces = [_Piece(c, g if gathering else 0.0) for c, g in zip(forwards, gathers)]
        return _together([_Piece(0.0, root), *pieces], overlaps=rates.overlaps)

    def backward(gathering: bool, reducing: bool) -> float:
        each = zip(backwards, gathers, reduces)
        pieces = [_Piece(c, g if gathering else 0.0, r if reducing else 0.0) for c, g, r in each]
        last = _Piece(0.0, 0.0, reduces_root if reducing else 0.0)
        return _together([*reversed(pieces), last], overlaps=rates.overlaps and not (splits and reducing))

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
        optimizer=0.0 if held.cpu_offload else rates.read(2 * stage.state_bytes + 3 * stage.reduced_bytes),
    )


def total(spent: Iterable[Seconds]) -> dict[str, float]:
    found: dict[str, float] = {}
    for seconds in spent:
        for what, of in seconds.items():
            found[what] = found.get(what, 0.0) + of
    return found


def _bytes(unit: Unit, *, gradients: bool) -> tuple[int, int]:
    """Bytes of a unit's whole parameters or gradients: those sharded over all data ranks, and those of experts.

    Experts in lists aren't among them: they are included in their part's traffic.
    """
    whole = {False: 0, True: 0}
    for parameter, numel in unit.whole:
        if parameter.requires_grad or not gradients:
            dtype = unit.gradient(parameter) if gradients else parameter.gathers_in
            whole[parameter.is_expert] += numel * dtype.itemsize
    return whole[False], whole[True]


def _on_links(unit: Unit | None, groups: Groups, rates: Rates, *, offloads: bool) -> tuple[float, float]:
    """Time to gather a unit; and to reduce-scatter its gradients, and all-reduce the shards over replicas."""
    if unit is None:
        return 0.0, 0.0
    links, to_host = rates.links, rates.to_host if offloads else lambda _: 0.0
    shared, experts = _bytes(unit, gradients=False)
    gather = to_host(unit.held) + links.gather(groups.shards, shared) + links.gather(groups.expert_shards, experts)
    shared, experts = _bytes(unit, gradients=True)
    shards = shared / groups.shards.size + experts / groups.expert_shards.size
    return gather, (
        links.gather(groups.shards, shared)
        + links.gather(groups.expert_shards, experts)
        + links.reduce(groups.replicas, shards)
        + to_host(unit.reduced)
    )


def sent(stage: Stage, layout: Layout, microbatches: int) -> dict[str, float]:
    """Bytes that a rank of a stage sends in a step, by axis; without pipeline transfers; of a batch's microbatches."""
    shards, experts = layout.shard_size, layout.shard_size // layout.expert_parallel_size
    replicas, batches = layout.data_parallel_replicas, stage.held.accumulates

    def ring(sizes: tuple[float, float]) -> float:
        return sizes[0] * (shards - 1) / shards + sizes[1] * (experts - 1) / experts

    runs = microbatches * batches
    gathers = batches if stage.keeps_gathered else 2 * runs
    reduces = runs if stage.held.reduce_each_microbatch else 1
    blocks = sum(ring(_bytes(unit, gradients=False)) for unit in stage.units.values())
    root = ring(_bytes(stage.root, gradients=False))
    gradients = [_bytes(unit, gradients=True) for unit in stage.every_unit]
    of_shards = sum(shared / shards + expert / experts for shared, expert in gradients)
    found: dict[str, float] = {
        DATA: gathers * blocks + batches * root + reduces * sum(map(ring, gradients)),
        REPLICAS: reduces * of_shards * 2 * (replicas - 1) / replicas,
    }
    for axis in (TENSOR, EXPERT):
        works = (work for cost in stage.costs for work in (cost.forward, cost.backward))
        found[axis] = runs * sum(work.traffic.get(axis, 0) for work in works)
    return {axis: nbytes for axis, nbytes in found.items() if nbytes}
