"""Device profiles: peak operations, memory and links. Those of vendors are in ``devices.yaml``, with sources.

No device reaches its peaks. The achieved fractions (:class:`Achieved`) and the latencies are assumptions, which no data
sheet gives: set them in your own profile, or measure with ``--calibrate``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from lightning_shard.arguments import check_count
from lightning_shard.errors import ConfigurationError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([KMGTP]?)(i?)B?\s*")
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


@dataclass(frozen=True)
class Link:
    """A link between devices.

    Attributes:
        bandwidth: Bytes per second of one device, in one direction.
        latency_s: Latency of a message from a device to its neighbour, in seconds.
        peers: For devices that are connected pairwise, without a switch: the number of links that ``bandwidth`` is the
            sum of.
    """

    bandwidth: float
    latency_s: float
    peers: int | None = None

    def among(self, devices: int) -> float:
        """The bandwidth of each device in a group of ``devices`` that communicate with each other."""
        if self.peers is None or devices > self.peers:
            return self.bandwidth
        return self.bandwidth * (devices - 1) / self.peers


@dataclass(frozen=True)
class Achieved:
    """The fractions of peaks that are taken to be achieved: assumptions, not measurements.

    Attributes:
        compute: Of peak operations, by matrix products. Large ones achieve more, small ones much less.
        memory: Of memory bandwidth, by memory-bound operations.
        links: Of link bandwidth, by collectives and transfers.
    """

    compute: float = 0.6
    memory: float = 0.8
    links: float = 0.8


@dataclass(frozen=True)
class Device:
    """An accelerator, and its connections.

    Attributes:
        name: The profile's name.
        flops: Peak FLOP/s of matrix products, by dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``; and
            ``"tfloat32"`` for float32 tensors that are rounded in products
            (``torch.set_float32_matmul_precision("high")``).
        memory: Memory in bytes.
        memory_bandwidth: Bytes per second.
        inside: The links to other devices of the same machine.
        between: The links to other machines.
        per_machine: Devices per machine.
        achieved: The achieved fractions of peaks.
        source: The source of the numbers.
        notes: Texts of what is assumed.
        host_bandwidth: Bytes per second between a device and host memory, in one direction; ``None`` if unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    inside: Link
    between: Link
    per_machine: int
    achieved: Achieved = Achieved()
    source: str = ""
    notes: tuple[str, ...] = ()
    host_bandwidth: float | None = None

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of this dtype.

        Raises:
            ConfigurationError: The profile has no peak for the dtype.
        """
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


_OPTIONAL = ("achieved", "notes", "host_bandwidth")
"""The attributes that a user's profile may omit."""
_LATENCY_INSIDE_S = 5e-6
_LATENCY_BETWEEN_S = 10e-6


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
    if isinstance(profile, Mapping):
        return _of_mapping(profile)
    if not isinstance(profile, str):
        raise ConfigurationError(
            f'device={profile!r} must be the name of a profile, such as "h100", the path of a .yaml file, or a mapping.'
        )
    if profile.endswith((".yaml", ".yml")):
        return _of_mapping(read_yaml(profile, "device"))
    name = profile.lower().replace("_", "-")
    if _ALSO.get(name, name) not in profiles():
        raise ConfigurationError(
            f"device={profile!r} isn't known: use one of {', '.join(profiles())}, or the path of a .yaml file with a"
            " profile of your own."
        )
    return profiles()[_ALSO.get(name, name)]


def size(value: object, setting: str) -> int:
    """Parse bytes: a number, or text such as ``"80GB"`` (10⁹) or ``"80GiB"`` (2³⁰).

    Raises:
        ConfigurationError: The value is neither.
    """
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        number, unit, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** _POWERS[unit]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{setting} ({value!r}) must be bytes: a number above 0, or such as 80GiB or 80GB.")
    return round(value)


def read_yaml(path: str, setting: str) -> dict[str, Any]:
    """The mapping that a YAML file holds.

    Raises:
        ConfigurationError: It can't be read, or holds something else.
    """
    from omegaconf import OmegaConf

    try:
        text = Path(path).read_text(encoding="utf-8")
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except Exception as error:  # from the OS, YAML or OmegaConf
        raise ConfigurationError(f"{setting}={path!r} can't be read ({error}): give a YAML file's path.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{setting}={path!r} must hold settings by name, and holds {type(found).__name__}.")
    return {str(key): value for key, value in found.items()}


def _of_mapping(given: Mapping[str, Any]) -> Device:
    given = dict(given)
    based_on = given.pop("based_on", None)
    own = given.get("name", based_on or "own")
    known = [field.name for field in fields(Device)]
    _check_names(given, known, f"device {own!r}")
    base = asdict(device(based_on)) if based_on is not None else {"source": "the user's profile"}
    values = {**base, "name": own, **given}
    missing = [name for name in known if values.get(name, {}) == {} and name not in _OPTIONAL]
    if missing:
        raise ConfigurationError(
            f"device {own!r} must say {', '.join(missing)}: add {'them' if len(missing) > 1 else 'it'}, or say"
            f" based_on, one of {', '.join(profiles())}."
        )
    for name, kind in (("flops", None), ("inside", Link), ("between", Link), ("achieved", Achieved)):
        values[name] = {**_mapping(base.get(name, {}), name), **_mapping(given.get(name, {}), name)}
        if kind is not None:
            _check_names(values[name], [field.name for field in fields(kind)], f"{name} of device {own!r}")
    return Device(
        str(own),
        {str(dtype): _above_zero(peak, f"flops.{dtype}") for dtype, peak in values["flops"].items()},
        size(values["memory"], "memory"),
        _above_zero(values["memory_bandwidth"], "memory_bandwidth"),
        _link(values["inside"], "inside"),
        _link(values["between"], "between"),
        check_count("per_machine", values["per_machine"]),
        Achieved(**{name: _fraction(value, f"achieved.{name}") for name, value in values["achieved"].items()}),
        f"the user's profile, based on {based_on}" if based_on else str(values["source"]),
        tuple(map(str, values.get("notes", ()))),
        None if values.get("host_bandwidth") is None else _above_zero(values["host_bandwidth"], "host_bandwidth"),
    )


def _check_names(given: Mapping[str, Any], known: list[str], where: str) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ConfigurationError(f"{where} says {', '.join(unknown)}, which isn't known: use {', '.join(known)}.")


def _mapping(value: Any, setting: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{setting} ({value!r}) must be settings by name.")
    return dict(value)


def _link(value: Mapping[str, Any], setting: str) -> Link:
    latency = value.get("latency_s", _LATENCY_INSIDE_S if setting == "inside" else _LATENCY_BETWEEN_S)
    if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 0 <= latency < math.inf:
        raise ConfigurationError(f"{setting}.latency_s ({latency!r}) must be a number of seconds of at least 0.")
    peers = value.get("peers")
    return Link(
        _above_zero(value.get("bandwidth"), f"{setting}.bandwidth"),
        float(latency),
        None if peers is None else check_count(f"{setting}.peers", peers),
    )


def _number(value: Any) -> float | None:
    """Convert a number, also from text, since YAML parses ``9e14`` as text; None if it is no number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return None if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)


def _above_zero(value: Any, setting: str) -> float:
    number = _number(value)
    if number is None or not number > 0:
        raise ConfigurationError(f"{setting} ({value!r}) must be a number above 0, per second.")
    return number


def _fraction(value: Any, setting: str) -> float:
    number = _number(value)
    if number is None or not 0 < number <= 1:
        raise ConfigurationError(f"{setting} ({value!r}) must be a fraction above 0 and at most 1.")
    return number
