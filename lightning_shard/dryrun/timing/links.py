"""How long ranks take to send each other something: which links a group uses, and what a collective costs there.

Ranks are numbered as ``layout.py`` says, and machines have so many of them, one after the other. A group is ranks at
equal distances: tensor-parallel ones are neighbours, the stages of a pipeline are farthest apart.

Collectives go round a ring, as bandwidth-optimal ones do (Thakur et al., "Optimization of Collective Communication
Operations in MPICH", 2005): of p ranks each sends (p − 1)/p of the whole in an all-gather or a reduce-scatter, and
twice that in an all-reduce. Where a ring crosses machines, each of a machine's k ranks of the group brings a network
adapter of its own, so the ring runs at k times the bandwidth of one, if the links inside of the machine let it. A
message passes each link of the ring once in a collective. Groups don't share links here, and switches are never too
slow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from lightning_shard.dryrun.timing.devices import Device
from lightning_shard.layout import Layout


@dataclass(frozen=True)
class Group:
    """Ranks that send each other something.

    Attributes:
        size: How many there are.
        machines: On how many machines.
        on_each: The fewest of them that are on one machine.
    """

    size: int
    machines: int = 1
    on_each: int = 1

    @property
    def is_inside(self) -> bool:
        return self.machines == 1


class Groups:
    """A layout's groups, each the most spread one of its axis.

    Args:
        per_machine: How many ranks a machine has.
    """

    def __init__(self, layout: Layout, per_machine: int) -> None:
        tensor, shards, experts = layout.tensor_parallel_size, layout.shard_size, layout.expert_parallel_size

        def group(step: int, size: int) -> Group:
            return _most_spread(step, size, layout.world_size, per_machine)

        self._layout = layout
        self._per_machine = per_machine
        self.tensor = group(1, tensor)
        self.expert = group(tensor, experts)
        self.shards = group(tensor, shards)
        self.expert_shards = group(tensor * experts, shards // experts)
        self.replicas = group(tensor * shards, layout.data_parallel_replicas)

    def between(self, one: int, other: int) -> Group:
        """A rank of one pipeline rank and its neighbour on another."""
        size, last = self._layout.stage_size, self._layout.pipeline_parallel_size - 1
        return _pairs((last - one) * size, (last - other) * size, size, self._per_machine)


@lru_cache(maxsize=4096)
def _most_spread(step: int, size: int, world: int, per_machine: int) -> Group:
    """Of the groups of ranks ``step`` apart, the one with the fewest of them on a machine."""
    firsts = (first for first in range(world) if first // step % size == 0)
    groups = {tuple(Counter((first + i * step) // per_machine for i in range(size)).values()) for first in firsts}
    return min(
        (Group(size, len(machines), min(machines)) for machines in groups),
        key=lambda group: (group.on_each / group.size, -group.machines),
    )


@lru_cache(maxsize=4096)
def _pairs(first: int, other: int, size: int, per_machine: int) -> Group:
    """Two ranks, of which each of so many pairs has one: from ``first`` on, and from ``other`` on."""
    crosses = any((first + i) // per_machine != (other + i) // per_machine for i in range(size))
    return Group(2, 2, 1) if crosses else Group(2, 1, 2)


class Links:
    """A device's links, for what goes over them; seconds."""

    def __init__(self, device: Device) -> None:
        self._inside, self._between = device.inside, device.between
        self._reached = device.achieved.links

    def ring(self, group: Group, sent: float, collectives: int = 1) -> float:
        """Collectives in which each rank sends so many bytes altogether; there is none where there are none to send."""
        if group.size == 1 or not collectives or not sent:
            return 0.0
        return sent / self._bandwidth(group) + collectives * self._round(group)

    def gather(self, group: Group, whole: float) -> float:
        """An all-gather or a reduce-scatter of so many bytes, the whole."""
        return self.ring(group, whole * (group.size - 1) / group.size)

    def reduce(self, group: Group, whole: float) -> float:
        """An all-reduce of so many bytes."""
        return 2 * self.gather(group, whole)

    def exchange(self, group: Group, sent: float, collectives: int = 1) -> float:
        """All-to-alls in which each rank sends so many bytes altogether, to each other rank as many."""
        if group.size == 1 or not collectives:
            return 0.0
        others = group.size - 1
        mates = min(group.on_each, group.size) - 1 if not group.is_inside else others
        inside_s = sent * mates / others / (self._inside.among(mates + 1) * self._reached) if mates else 0.0
        between_s = sent * (others - mates) / others / (self._between.bandwidth * self._reached)
        latency_s = self._inside.latency_s if group.is_inside else self._between.latency_s
        return max(inside_s, between_s) + collectives * latency_s

    def transfer(self, cut: Group, sent: float) -> float:
        """From a rank to one of the next stage."""
        link = self._inside if cut.is_inside else self._between
        bandwidth = link.among(2) if cut.is_inside else link.bandwidth
        return sent / (bandwidth * self._reached) + link.latency_s if sent else 0.0

    def _bandwidth(self, group: Group) -> float:
        if group.is_inside:
            return self._inside.among(group.size) * self._reached
        between = group.on_each * self._between.bandwidth
        inside = self._inside.among(group.on_each) if group.on_each > 1 else between
        return min(inside, between) * self._reached

    def _round(self, group: Group) -> float:
        """A message's way past all ranks of a ring."""
        crossing = group.machines if not group.is_inside else 0
        return (
            (group.size - 1)
            / group.size
            * ((group.size - crossing) * self._inside.latency_s + crossing * self._between.latency_s)
        )
