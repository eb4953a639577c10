"""Communication times: which links a group of ranks uses, and what a collective or a transfer costs there.

Ranks are numbered as in ``layout.py``, and each machine has ``per_machine`` consecutive ranks. A group consists of
ranks at equal distances: tensor-parallel ranks are neighbours, pipeline stages are farthest apart.

Collectives use a ring, as bandwidth-optimal algorithms do (Thakur et al., "Optimization of Collective Communication
Operations in MPICH", 2005): each of p ranks sends (p − 1)/p of the whole in an all-gather or a reduce-scatter, and
twice that in an all-reduce. If a ring crosses machines, each of a machine's k ranks of the group uses its own network
adapter, so the ring has k times the bandwidth of one adapter, unless the links inside the machine limit it. In a
collective, a message passes each link of the ring once. Limits of the model: groups don't contend for links, and
switches are never a bottleneck.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from lightning_shard.dryrun.timing.devices import Device
from lightning_shard.layout import Layout


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks."""

    size: int
    machines: int = 1  # the number of machines that they are on
    on_each: int = 1  # the smallest number of them on one machine

    @property
    def is_inside(self) -> bool:
        return self.machines == 1


class Groups:
    """A layout's groups; for each axis, the one that is spread over most machines."""

    def __init__(self, layout: Layout, per_machine: int) -> None:
        tensor, shards, experts = layout.tensor_parallel_size, layout.shard_size, layout.expert_parallel_size

        def group(step: int, size: int) -> Group:
            return _most_spread(step, size, layout.world_size, per_machine)

        self.layout, self._per_machine = layout, per_machine
        self.tensor = group(1, tensor)
        self.expert = group(tensor, experts)
        self.shards = group(tensor, shards)
        self.expert_shards = group(tensor * experts, shards // experts)
        self.replicas = group(tensor * shards, layout.data_parallel_replicas)

    def between(self, one: int, other: int) -> Group:
        """The pair of ranks that communicate between two pipeline ranks."""
        size, last = self.layout.stage_size, self.layout.pipeline_parallel_size - 1
        return _pairs((last - one) * size, (last - other) * size, size, self._per_machine)


@lru_cache(maxsize=4096)
def _most_spread(step: int, size: int, world: int, per_machine: int) -> Group:
    """Of all groups of ``size`` ranks at distance ``step``, the one with the fewest ranks per machine."""
    firsts = (first for first in range(world) if first // step % size == 0)
    groups = {tuple(Counter((first + i * step) // per_machine for i in range(size)).values()) for first in firsts}
    return min(
        (Group(size, len(machines), min(machines)) for machines in groups),
        key=lambda group: (group.on_each / group.size, -group.machines),
    )


@lru_cache(maxsize=4096)
def _pairs(first: int, other: int, size: int, per_machine: int) -> Group:
    """The slowest of ``size`` pairs: ranks from ``first`` on, each with its counterpart from ``other`` on."""
    crosses = any((first + i) // per_machine != (other + i) // per_machine for i in range(size))
    return Group(2, 2, 1) if crosses else Group(2, 1, 2)


class Links:
    """Communication times over a device's links, in seconds."""

    def __init__(self, device: Device) -> None:
        self._inside, self._between = device.inside, device.between
        self._reached = device.achieved.links

    def ring(self, group: Group, sent: float, collectives: int = 1) -> float:
        """Ring collectives in which each rank sends ``sent`` bytes in total; 0 if nothing is sent."""
        if group.size == 1 or not collectives or not sent:
            return 0.0
        return sent / self._bandwidth(group) + collectives * self._round(group)

    def gather(self, group: Group, whole: float) -> float:
        """An all-gather or a reduce-scatter; ``whole`` is the full tensor's bytes."""
        return self.ring(group, whole * (group.size - 1) / group.size)

    def reduce(self, group: Group, whole: float) -> float:
        """An all-reduce of ``whole`` bytes."""
        return 2 * self.gather(group, whole)

    def exchange(self, group: Group, sent: float, collectives: int = 1) -> float:
        """All-to-alls in which each rank sends ``sent`` bytes in total, evenly to the other ranks."""
        if group.size == 1 or not collectives:
            return 0.0
        others = group.size - 1
        mates = min(group.on_each, group.size) - 1 if not group.is_inside else others
        inside_s = sent * mates / others / (self._inside.among(mates + 1) * self._reached) if mates else 0.0
        between_s = sent * (others - mates) / others / (self._between.bandwidth * self._reached)
        latency_s = self._inside.latency_s if group.is_inside else self._between.latency_s
        return max(inside_s, between_s) + collectives * latency_s

    def transfer(self, cut: Group, sent: float) -> float:
        """A transfer of ``sent`` bytes from a rank to one of the next stage."""
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
        """Latency of a message that passes all ranks of a ring."""
        crossing = group.machines if not group.is_inside else 0
        around_s = (group.size - crossing) * self._inside.latency_s + crossing * self._between.latency_s
        return (group.size - 1) / group.size * around_s
