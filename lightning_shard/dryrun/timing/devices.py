"""Device profiles: peak operations, memory and links. Those of vendors are in ``devices.yaml``, with sources.

No device reaches its peaks. The achieved fractions (:class:`Achieved`) and the latencies are assumptions, which no data
sheet gives: set them in your own profile.

For each part, forward and backward, a rank's time consists of

* *products*: matrix products, convolutions and attention, at the device's peak or its memory's bandwidth, whichever is
  slower (roofline model);
* *memory*: other operations, each of which reads its inputs and writes its outputs (no fusion);
* *tensor*, *expert*: communication along these axes, which computation waits for.

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

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from lightning_shard.arguments import check_count, size
from lightning_shard.dryrun.counting.counts import EXPERT, TENSOR, Cost, Work
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout


@dataclass(frozen=True)
class Link:
    """A link between devices."""

    bandwidth: float  # bytes per second of one device, in one direction
    latency_s: float  # of a message from a device to its neighbour
    peers: int | None = None
    """For devices that are connected pairwise, without a switch: of how many links ``bandwidth`` is the sum."""

    def among(self, devices: int) -> float:
        """The bandwidth of each device in a group of ``devices`` that communicate with each other."""
        if self.peers is None or devices > self.peers:
            return self.bandwidth
        return self.bandwidth * (devices - 1) / self.peers


@dataclass(frozen=True)
class Achieved:
    """The fractions of peaks that are taken to be achieved: assumptions, not measurements."""

    compute: float = 0.6  # of peak operations, by matrix products; large ones achieve more, small ones much less
    memory: float = 0.8  # of memory bandwidth, by memory-bound operations
    links: float = 0.8  # of link bandwidth, by collectives and transfers


@dataclass(frozen=True)
class Device:
    """An accelerator, and its connections."""

    name: str
    flops: Mapping[str, float]
    """Peak FLOP/s of matrix products, by dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``; and ``"tfloat32"`` for
    float32 tensors that are rounded in products (``torch.set_float32_matmul_precision("high")``)."""
    memory: int  # bytes
    memory_bandwidth: float  # bytes per second
    inside: Link  # to other devices of the same machine
    between: Link  # to other machines
    per_machine: int  # devices per machine
    achieved: Achieved = Achieved()
    source: str = ""  # of the numbers
    notes: tuple[str, ...] = ()  # texts of what is assumed

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of this dtype; refuses one for which the profile has none."""
        if dtype not in self.flops:
            raise ConfigurationError(
                f"device={self.name!r} has no peak for {dtype}, and has one for {', '.join(self.flops)}: use a"
                f" precision that it computes in, or a profile that says flops.{dtype}."
            )
        return self.flops[dtype]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Texts of the assumptions that every time estimate is based on."""
        reached = self.achieved
        return (
            f"{100 * reached.compute:g} % of peak operations, {100 * reached.memory:g} % of memory bandwidth and"
            f" {100 * reached.links:g} % of link bandwidth are reached",
            f"a message takes {1e6 * self.inside.latency_s:g} µs within a machine, {1e6 * self.between.latency_s:g} µs"
            " between machines",
            *self.notes,
        )


_OPTIONAL = ("achieved", "notes")
"""The attributes that a user's profile may omit."""
_LATENCIES_S = {"inside": 5e-6, "between": 10e-6}
"""Assumed where a profile says none."""
_ALSO = {"h100-sxm": "h100", "h200-sxm": "h200", "b200-sxm": "b200", "a100": "a100-80gb"}


@cache
def profiles() -> Mapping[str, Device]:
    """The profiles of ``devices.yaml``, by name."""
    found = read_yaml(str(Path(__file__).with_name("devices.yaml")), "devices.yaml")
    return {name: _of_mapping({"name": name, **values}) for name, values in found.items()}


def device(profile: str | Mapping[str, Any] | Device) -> Device:
    """Get a profile by its name, from a YAML file's path, or from a mapping.

    A user's profile has the attributes of :class:`Device`; with ``based_on`` it has only those that differ::

        based_on: h100
        name: our-cluster
        per_machine: 4
        memory: 96GB
        between: {bandwidth: 25e9}
        achieved: {compute: 0.45}

    Raises:
        ConfigurationError: There is no such profile or file, or it has an unknown or invalid setting.
    """
    if isinstance(profile, Device):
        return profile
    if isinstance(profile, str) and profile.endswith((".yaml", ".yml")):
        profile = read_yaml(profile, "device")
    if isinstance(profile, Mapping):
        return _of_mapping(profile)
    if not isinstance(profile, str):
        raise ConfigurationError(
            f'device={profile!r} must be the name of a profile, such as "h100", the path of a .yaml file, or a mapping.'
        )
    name = profile.lower().replace("_", "-")
    name = _ALSO.get(name, name)
    if name not in profiles():
        raise ConfigurationError(
            f"device={profile!r} isn't known: use one of {', '.join(profiles())}, or the path of a .yaml file with a"
            " profile of your own."
        )
    return profiles()[name]


def read_yaml(path: str, setting: str) -> dict[str, Any]:
    """The mapping that a YAML file holds; refuses a file that can't be read, or holds something else."""
    from omegaconf import OmegaConf

    try:
        text = Path(path).read_text(encoding="utf-8")
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except Exception as error:  # from the OS, YAML or OmegaConf
        raise ConfigurationError(f"{setting}={path!r} can't be read ({error}): give a YAML file's path.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{setting}={path!r} must hold settings by name, and holds {type(found).__name__}.")
    return {str(key): value for key, value in found.items()}


_PER_SECOND, _FRACTION = "a number above 0, per second", "a fraction above 0 and at most 1"


def _of_mapping(given: Mapping[str, Any]) -> Device:
    given = dict(given)
    based_on = given.pop("based_on", None)
    own = given.get("name", based_on or "own")
    known = _checked_names(given, Device, f"device {own!r}")
    base: dict[str, Any] = asdict(device(based_on)) if based_on is not None else {"source": "the user's profile"}
    values = {**base, "name": str(own), **given}
    missing = [name for name in known if values.get(name, {}) == {} and name not in _OPTIONAL]
    if missing:
        raise ConfigurationError(
            f"device {own!r} must say {', '.join(missing)}: add {'them' if len(missing) > 1 else 'it'}, or say"
            f" based_on, one of {', '.join(profiles())}."
        )
    for name, kind in (("flops", None), ("inside", Link), ("between", Link), ("achieved", Achieved)):
        if not isinstance(given.get(name, {}), Mapping):
            raise ConfigurationError(f"{name} ({given[name]!r}) must be settings by name.")
        values[name] = {**base.get(name, {}), **given.get(name, {})}
        if kind is not None:
            _checked_names(values[name], kind, f"{name} of device {own!r}")
    values["flops"] = {str(dtype): _number(peak, f"flops.{dtype}") for dtype, peak in values["flops"].items()}
    values["memory"] = size(values["memory"], "memory")
    values["memory_bandwidth"] = _number(values["memory_bandwidth"], "memory_bandwidth")
    for name, latency_s in _LATENCIES_S.items():
        values[name] = _link({"latency_s": latency_s, **values[name]}, name)
    values["per_machine"] = check_count("per_machine", values["per_machine"])
    achieved = {name: _number(value, f"achieved.{name}", _FRACTION, 1) for name, value in values["achieved"].items()}
    values["achieved"] = Achieved(**achieved)
    values["source"] = f"the user's profile, based on {based_on}" if based_on else str(values["source"])
    values["notes"] = tuple(map(str, values.get("notes", ())))
    return Device(**values)


def _checked_names(given: Mapping[str, Any], kind: Any, where: str) -> list[str]:
    """The attributes of a dataclass; refuses settings that aren't among them."""
    known = [field.name for field in fields(kind)]
    if unknown := [name for name in given if name not in known]:
        raise ConfigurationError(f"{where} says {', '.join(unknown)}, which isn't known: use {', '.join(known)}.")
    return known


def _link(value: Mapping[str, Any], setting: str) -> Link:
    latency, peers = value["latency_s"], value.get("peers")
    return Link(
        _number(value.get("bandwidth"), f"{setting}.bandwidth"),
        0.0 if latency == 0 else _number(latency, f"{setting}.latency_s", "a number of seconds of at least 0"),
        None if peers is None else check_count(f"{setting}.peers", peers),
    )


def _number(value: Any, setting: str, must: str = _PER_SECOND, most: float = math.inf) -> float:
    """A number above 0, also from text, since YAML parses ``9e14`` as text."""
    with suppress(TypeError, ValueError):
        if not isinstance(value, bool) and 0 < float(value) <= most:
            return float(value)
    raise ConfigurationError(f"{setting} ({value!r}) must be {must}.")


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


PRODUCTS, MEMORY = "products", "memory"

Seconds = Mapping[str, float]
"""Seconds by purpose."""


class Rates:
    """Times of work on a device, with matrix products of a dtype."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self.links = device, Links(device)
        self.peak = device.peak(dtype)
        self._products = self.peak * device.achieved.compute
        self._memory = device.memory_bandwidth * device.achieved.memory

    def read(self, nbytes: float) -> float:
        return nbytes / self._memory

    def spent(self, work: Work, groups: Groups) -> dict[str, float]:
        products = max(work.flops / self._products, self.read(work.moved - work.beside))
        return {PRODUCTS: products, MEMORY: self.read(work.beside), **self._sent(work, groups)}

    def of_weights(self, cost: Cost, groups: Groups) -> float:
        """Time of a split backward's second part: the gradients of matrix products' weights."""
        if cost.parts is None:
            return 0.0
        whole, weights = self.spent(cost.backward, groups), self.spent(cost.parts.weights, groups)
        return min(whole[PRODUCTS] + whole[MEMORY], weights[PRODUCTS] + weights[MEMORY])

    def _sent(self, work: Work, groups: Groups) -> dict[str, float]:
        ways = (TENSOR, self.links.ring, groups.tensor), (EXPERT, self.links.exchange, groups.expert)
        return {
            axis: send(group, work.traffic[axis], work.collectives.get(axis, 1))
            for axis, send, group in ways
            if work.traffic.get(axis)
        }


def dtype_of(precision: str) -> str:
    """The dtype of matrix products under a Trainer's precision."""
    kinds = {"bf16": "bfloat16", "16": "float16", "64": "float64"}
    return kinds.get(precision.partition("-")[0], "float32")
