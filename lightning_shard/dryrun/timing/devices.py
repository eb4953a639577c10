"""Device profiles: peak operations, memory and links as vendors publish them, with sources.

Peaks are for dense matrix products (vendors also print twice that, for 2:4 sparsity). A GB is 10⁹ bytes, as on data
sheets; what devices report beyond that is about what the driver uses. Link bandwidths are of one device in one
direction: half of the bidirectional sum that data sheets print.

No device reaches its peaks. The achieved fractions (:class:`Achieved`) and the latencies are assumptions, which no data
sheet gives: set them in your own profile, or measure with ``--calibrate``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_shard.arguments import check_count
from lightning_shard.errors import ConfigurationError

GB = 10**9
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


def _switched(bandwidth: float) -> Link:
    return Link(bandwidth, _LATENCY_INSIDE_S)


def _network(bits: float) -> Link:
    """A network link of ``bits`` per second for each device."""
    return Link(bits / 8, _LATENCY_BETWEEN_S)


_A100_SHEET = (
    "NVIDIA A100 Tensor Core GPU, data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100_SHEET = "NVIDIA H100 Tensor Core GPU, data sheet: https://resources.nvidia.com/en-us-tensor-core"
_H200_SHEET = (
    "NVIDIA H200 Tensor Core GPU, data sheet: https://nvdam.widen.net/s/nb5zzzsjdf/"
    "hpc-datasheet-sc23-h200-datasheet-3002446"
)
_B200_SHEET = (
    "NVIDIA HGX platform, specifications of HGX B200: https://www.nvidia.com/en-us/data-center/hgx/; NVIDIA DGX B200"
    " user guide: https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html"
)
_MI300X_SHEET = (
    "AMD Instinct MI300X accelerator, data sheet: https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/"
    "data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)
_ADA_PAPER = (
    "NVIDIA Ada GPU architecture, white paper: https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/"
    "nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
)
_L4_SHEET = "NVIDIA L4 Tensor Core GPU, data sheet: https://www.nvidia.com/en-us/data-center/l4/"
_T4_SHEET = (
    "NVIDIA T4 Tensor Core GPU, data sheet: https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
    "t4-tensor-core-datasheet-951643.pdf"
)
_V100_SHEET = (
    "NVIDIA V100 Tensor Core GPU, data sheet: https://images.nvidia.com/content/technologies/volta/pdf/"
    "volta-v100-datasheet-update-us-1165301-r5.pdf"
)

_OF_A_DGX = "between machines: one {0} Gb/s network adapter for each device, as in a {1}"
_NO_NETWORK = "between machines: {0} is assumed, since that is the machine's and not the device's"
_PCIE = {"3.0": 16e9, "4.0": 32e9, "5.0": 64e9}
"""Bytes per second of 16 lanes in one direction, by PCIe generation: half of what data sheets print."""
_OVER_PCIE = "within a machine: PCIe {0}; bridges between pairs aren't taken into account"


def _halves(peak: float) -> dict[str, float]:
    """The same peak for both 16-bit dtypes."""
    return {"bfloat16": peak, "float16": peak}


def _a100(name: str, memory: int, memory_bandwidth: float, *, sxm: bool = True) -> Device:
    return Device(
        name,
        {**_halves(312e12), "tfloat32": 156e12, "float32": 19.5e12},
        memory * GB,
        memory_bandwidth,
        _switched(300e9 if sxm else _PCIE["4.0"]),
        _network(200e9),
        8,
        source=_A100_SHEET,
        notes=(_OF_A_DGX.format(200, "DGX A100"),)
        if sxm
        else (_OVER_PCIE.format("4.0 × 16"), _NO_NETWORK.format("200 Gb/s for each device")),
        host_bandwidth=_PCIE["4.0"],
    )


def _hopper(name: str, memory: int, memory_bandwidth: float, source: str) -> Device:
    return Device(
        name,
        {**_halves(989.4e12), "tfloat32": 494.7e12, "float32": 66.9e12},
        memory * GB,
        memory_bandwidth,
        _switched(450e9),
        _network(400e9),
        8,
        source=source,
        notes=(_OF_A_DGX.format(400, "DGX H100 or H200"),),
        host_bandwidth=_PCIE["5.0"],
    )


_PROFILES = (
    _a100("a100-40gb", 40, 1555e9),
    _a100("a100-80gb", 80, 2039e9),
    _a100("a100-80gb-pcie", 80, 1935e9, sxm=False),
    _hopper("h100", 80, 3.35e12, _H100_SHEET),
    _hopper("h200", 141, 4.8e12, _H200_SHEET),
    Device(
        "h100-pcie",
        {**_halves(756e12), "tfloat32": 378e12, "float32": 51.2e12},
        80 * GB,
        2e12,
        _switched(_PCIE["5.0"]),
        _network(400e9),
        8,
        source=_H100_SHEET,
        notes=(_OVER_PCIE.format("5.0 × 16"), _NO_NETWORK.format("400 Gb/s for each device")),
        host_bandwidth=_PCIE["5.0"],
    ),
    Device(
        "b200",
        {**_halves(2.25e15), "tfloat32": 1.125e15, "float32": 75e12},
        180 * GB,
        8e12,
        _switched(900e9),
        _network(400e9),
        8,
        source=_B200_SHEET,
        notes=(_OF_A_DGX.format(400, "DGX B200"),),
    ),
    Device(
        "mi300x",
        {**_halves(1307.4e12), "tfloat32": 653.7e12, "float32": 163.4e12},
        192 * GB,
        5.3e12,
        Link(448e9, _LATENCY_INSIDE_S, peers=7),
        _network(400e9),
        8,
        source=_MI300X_SHEET,
        notes=(
            "within a machine: a link of 64 GB/s each way to each of 7 others; fewer devices use fewer of them",
            _NO_NETWORK.format("400 Gb/s for each device"),
        ),
        host_bandwidth=_PCIE["5.0"],
    ),
    Device(
        "l4",
        {**_halves(121e12), "tfloat32": 60e12, "float32": 30.3e12},
        24 * GB,
        300e9,
        _switched(_PCIE["4.0"]),
        _network(100e9 / 8),
        8,
        source=_L4_SHEET,
        notes=(_OVER_PCIE.format("4.0 × 16"), _NO_NETWORK.format("100 Gb/s for a machine of 8")),
        host_bandwidth=_PCIE["4.0"],
    ),
    Device(
        "rtx-4090",
        {**_halves(165.2e12), "tfloat32": 82.6e12, "float32": 82.6e12},
        24 * GB,
        1008e9,
        _switched(_PCIE["4.0"]),
        _network(100e9 / 8),
        8,
        source=_ADA_PAPER,
        notes=(
            "within a machine: PCIe 4.0 × 16, though without peer-to-peer access, so through the host's memory, which"
            " may be slower",
            _NO_NETWORK.format("100 Gb/s for a machine of 8"),
        ),
    ),
    Device(
        "t4",
        {"float16": 65e12, "float32": 8.1e12},
        16 * GB,
        320e9,
        _switched(_PCIE["3.0"]),
        _network(50e9 / 4),
        4,
        source=_T4_SHEET,
        notes=(_OVER_PCIE.format("3.0 × 16"), _NO_NETWORK.format("50 Gb/s for a machine of 4")),
        host_bandwidth=_PCIE["3.0"],
    ),
    Device(
        "v100",
        {"float16": 125e12, "float32": 15.7e12},
        32 * GB,
        900e9,
        Link(150e9, _LATENCY_INSIDE_S, peers=6),
        _network(50e9),
        8,
        source=_V100_SHEET,
        notes=(
            "within a machine: 6 links of 25 GB/s in each direction; fewer devices use fewer of them",
            "between machines: four 100 Gb/s network adapters for 8 devices, as in a DGX-1",
        ),
    ),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _PROFILES}
_ALSO = {"h100-sxm": "h100", "h200-sxm": "h200", "b200-sxm": "b200", "a100": "a100-80gb"}


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
    if _ALSO.get(name, name) not in DEVICES:
        raise ConfigurationError(
            f"device={profile!r} isn't known: use one of {', '.join(DEVICES)}, or the path of a .yaml file with a"
            " profile of your own."
        )
    return DEVICES[_ALSO.get(name, name)]


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
            f" based_on, one of {', '.join(DEVICES)}."
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
