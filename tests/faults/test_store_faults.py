"""Stores that fail, at every request: what was there stays or is replaced as a whole, in bounded time, with our errors.

A proxy stands before a real S3 or WebDAV server; parts are patched small, so that a few hundred KB are many requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor, distributed

from lightning_shard import checkpoint
from lightning_shard.checkpoint.convert import write
from lightning_shard.checkpoint.store import calls, open_store, remote, s3
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from lightning_shard.testing import run_ranks
from tests.proxy import Fault, Proxy, behind, from_then_on, no_fault, once, through
from tests.servers import BUCKET, Server, serve

GROUP = "Stores that fail"
STALL_S = 1.0
BOUND_S = 60.0
"""Far more than any trial may take: a busy machine is no failure, a wait without end is."""
PASSING = [500, "slow down", 429, "reset", "lost", "half sent", "cut"]
"""Faults that a second attempt outlasts."""
HANGING = ["stall", "late", "cut stall"]
FINAL = [403, "expired", 404]
WRONG = ["short", "shifted"]
"""Answers that look right: what is read is refused or read again, what is written is whole."""

Ledger = Callable[..., None]


def use_small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(s3, "PART_BYTES", 2**16)
    patch.setattr(remote, "PUT_BYTES", 2**15)
    patch.setattr(remote, "RANGE_BYTES", 2**16)
    patch.setattr(remote.RemoteStore, "step_bytes", 2**16)
    patch.setattr(write, "MIN_SHARED_BYTES", 2**16)
    patch.setattr(calls, "MAX_WAIT_S", 0.02)
    patch.setattr(calls, "ATTEMPTS", 4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_parts(monkeypatch)


def state(step: int) -> dict[str, Tensor]:
    """Steps differ in every file, and in no length."""
    return {"large": torch.arange(40 * 2**10, dtype=torch.int32) + step, "small": torch.full((10,), float(step))}


@dataclass
class Place:
    """A path behind a proxy, and what goes straight to its server."""

    path: str
    proxy: Proxy
    options: dict[str, Any]
    straight: dict[str, Any]

    def save(self, step: int, path: str | None = None) -> None:
        checkpoint.save(state(step), path or self.path, trainer_state={"step": step}, storage_options=self.options)

    def step_there(self, path: str | None = None) -> int | None:
        """Which checkpoint is there, whole; None for none."""
        path = path or self.path
        try:
            stored = checkpoint.read(path, storage_options=self.straight)
        except CheckpointNotFoundError:
            return None
        assert checkpoint.verify(path, storage_options=self.straight).ok
        step = stored.trainer_state()["step"]
        assert all(torch.equal(stored[name].full(), tensor) for name, tensor in state(step).items())
        return step

    def uploads(self) -> list[str]:
        if not self.path.startswith("s3"):
            return []
        found = fsspec.filesystem("s3", **self.straight).call_s3("list_multipart_uploads", Bucket=BUCKET)
        return [upload["Key"] for upload in found.get("Uploads", ())]


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve("s3", tmp_path_factory.mktemp("s3") / "data") as server:
        yield server


@pytest.fixture
def place(s3_server: Server, tmp_path: Path) -> Iterator[Place]:
    with behind(s3_server.endpoint, conditions=s3_server.folder) as proxy:
        options = through(s3_server.options, proxy)
        yield Place(f"{s3_server.url}/{tmp_path.name}/c", proxy, options, s3_server.options)


def hasty(place: Place) -> Place:
    return Place(place.path, place.proxy, {**place.options, "stall_s": STALL_S}, place.straight)


def count_requests(place: Place, work: Callable[[], object]) -> int:
    """How many it makes when nothing goes wrong."""
    place.proxy.arm(no_fault)
    work()
    return place.proxy.requests


def attempt(work: Callable[[], object]) -> Exception | None:
    """Its error, which must be one of ours or an OSError, within bounded time."""
    begun = time.monotonic()
    try:
        work()
        error = None
    except (CheckpointError, OSError) as failure:
        error = failure
    assert time.monotonic() - begun < BOUND_S, "it waited too long"
    return error


def try_saves(place: Place, faults: list[Callable[[int], Any]], at: range) -> tuple[int, list[str]]:
    """Overwrite a checkpoint once for each request and fault; returns how often, and what didn't hold."""
    step = 1
    place.proxy.arm(no_fault)
    place.save(step)
    tried, lost = 0, []
    for fault in faults:
        for number in at:
            place.proxy.arm(fault(number))
            error = attempt(lambda: place.save(step + 1))
            hit = place.proxy.faults
            place.proxy.arm(no_fault)
            tried += hit > 0
            there = place.step_there()
            if there != step + 1 and (error is None or there != step):
                lost.append(f"request {number}: {there} is there after {step + 1} on {step}, {error!r}")
            step = max(step + 1, there or 0)
            if there is None:
                place.save(step)
    return tried, lost


def requests_of_a_save(place: Place) -> int:
    place.save(1)
    return count_requests(place, lambda: place.save(2))


@pytest.mark.parametrize("fault", PASSING)
def test_a_save_outlasts_a_fault_at_any_request(fault: Fault, place: Place, ledger: Ledger) -> None:
    lost = []
    total = requests_of_a_save(place)
    for number in range(1, total + 1):
        place.proxy.arm(once(number, fault))
        error = attempt(lambda step=number: place.save(step))
        assert place.proxy.faults
        place.proxy.arm(no_fault)
        if error is not None or place.step_there() != number or place.uploads():
            lost.append(f"request {number}: {error!r}, uploads {place.uploads()}")
    print(*lost, sep="\n")
    ledger(GROUP, f"S3, a save: {fault} at one request, every one in turn", tried=total, lost=len(lost))
