"""Profiles of devices: the numbers are those that were printed, a user's own is checked, and nothing is silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_shard.dryrun.timing.devices import Device, device, profiles
from lightning_shard.errors import ConfigurationError

PRINTED = {  # bfloat16 (float16 where there is none) per second, bytes, bytes per second
    "a100-40gb": (312e12, 40e9, 1555e9),
    "a100-80gb": (312e12, 80e9, 2039e9),
    "a100-80gb-pcie": (312e12, 80e9, 1935e9),
    "h100": (989.4e12, 80e9, 3.35e12),
    "h100-pcie": (756e12, 80e9, 2e12),
    "h200": (989.4e12, 141e9, 4.8e12),
    "b200": (2.25e15, 180e9, 8e12),
    "mi300x": (1307.4e12, 192e9, 5.3e12),
    "l4": (121e12, 24e9, 300e9),
    "rtx-4090": (165.2e12, 24e9, 1008e9),
    "t4": (65e12, 16e9, 320e9),
    "v100": (125e12, 32e9, 900e9),
}
OWN: dict[str, Any] = {
    "name": "ours",
    "flops": {"bfloat16": 100e12},
    "memory": "40GiB",
    "memory_bandwidth": "1e12",
    "inside": {"bandwidth": 50e9},
    "between": {"bandwidth": 5e9, "latency_s": 0},
    "per_machine": 4,
}


def test_the_profiles_are_what_was_printed() -> None:
    found = {
        name: (d.flops.get("bfloat16", d.flops["float16"]), d.memory, d.memory_bandwidth)
        for name, d in profiles().items()
    }
    assert found == PRINTED


@pytest.mark.parametrize("profile", profiles().values(), ids=profiles())
def test_every_profile_says_where_it_is_from_and_what_is_assumed(profile: Device) -> None:
    assert "https://" in profile.source
    assert any("between machines" in said for said in profile.notes)
    assert "60 % of peak operations" in profile.assumptions[0]
    assert profile.inside.bandwidth >= profile.between.bandwidth


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    own = device(OWN)
    assert (own.memory, own.memory_bandwidth, own.between.latency_s) == (40 * 2**30, 1e12, 0)
    assert own.source == "the user's profile"
    path = tmp_path / "own.yaml"
    path.write_text(
        "based_on: h100\nper_machine: 4\nflops: {bfloat16: 9e14}\nbetween: {bandwidth: 25e9}\n"
        "achieved: {compute: 0.4}\n"
    )
    based = device(str(path))
    assert (based.peak("bfloat16"), based.peak("float16")) == (9e14, 989.4e12)
    assert (based.per_machine, based.between.bandwidth, based.inside) == (4, 25e9, device("h100").inside)
    assert (based.achieved.compute, based.achieved.memory) == (0.4, device("h100").achieved.memory)
    assert based.source == "the user's profile, based on h100"


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in OWN.items() if key != name}


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("h1000", "device='h1000' isn't known: use one of a100-40gb,"),
        ("missing.yaml", "can't be read"),
        (without("between"), "must say between: add it, or say based_on"),
        ({**OWN, "speed": 1}, "says speed, which isn't known: use name, flops"),
        ({**OWN, "inside": {"bandwith": 1}}, "inside of device 'ours' says bandwith, which isn't known"),
        ({**OWN, "inside": 5}, r"inside \(5\) must be settings by name"),
        ({**OWN, "inside": {"latency_s": 0}}, r"inside.bandwidth \(None\) must be a number above 0"),
        ({**OWN, "memory": "much"}, r"memory \('much'\) must be bytes"),
        ({**OWN, "memory_bandwidth": 0}, r"memory_bandwidth \(0\) must be a number above 0"),
        ({**OWN, "flops": {"bfloat16": "fast"}}, r"flops.bfloat16 \('fast'\) must be a number above 0"),
        ({**OWN, "flops": {}}, "must say flops"),
        ({**OWN, "achieved": {"compute": 60}}, r"achieved.compute \(60\) must be a fraction"),
        ({**OWN, "between": {"bandwidth": 1, "latency_s": -1}}, r"between.latency_s \(-1\) must be"),
        ({**OWN, "per_machine": 2.5}, r"per_machine \(2.5\) must be an integer"),
    ],
)
def test_what_cant_be_is_refused(profile: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        device(profile)


def test_a_file_without_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigurationError, match="must hold settings by name"):
        device(str(path))


def test_a_type_that_a_device_doesnt_compute_in_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="device='t4' has no peak for bfloat16, and has one for float16"):
        device("t4").peak("bfloat16")
