"""Stores that fail, at every request: what was there stays or is replaced as a whole, in bounded time, with our errors.

A proxy stands before a real S3 or WebDAV server; parts are patched small, so that a few hundred KB are many requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from torch import Tensor, distributed

from lightning_shard import checkpoint
from lightning_shard.checkpoint import catalog
from lightning_shard.checkpoint.store import calls, open_store, remote, s3
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from lightning_shard.testing import run_ranks
from tests.proxy import Fault, FaultOf, Proxy, behind, from_then_on, no_fault, once, through
from tests.servers import BUCKET, Server, serve

GROUP = "Stores that fail"
STALL_S = 0.5
BOUND_S = 240.0
"""Far more than any trial may take: a busy machine is no failure, a wait without end is."""
LONG_S = 1800.0
"""For a test that takes minutes where no request is left out."""
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
    patch.setattr(calls, "MAX_WAIT_S", 0.02)
    patch.setattr(calls, "ATTEMPTS", 4)


@pytest.fixture
def full_run(request: pytest.FixtureRequest) -> bool:
    """Whether the long tests were asked for, with the others or without: then no request is left out."""
    return request.config.getoption("-m") in ("long", "long or not long")


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

    def load(self, step: int) -> None:
        into = {name: torch.zeros_like(tensor) for name, tensor in state(step).items()}
        checkpoint.load(self.path, into, storage_options=self.options)
        assert all(torch.equal(into[name], tensor) for name, tensor in state(step).items()), "a wrong value"

    def gather(self, out: str, path: str | None = None) -> None:
        at = {"storage_options": self.options, "out_storage_options": self.options}
        checkpoint.gather(path or self.path, out, **at)

    def under(self, fault: FaultOf, work: Callable[[], object]) -> Exception | None:
        """The error of something that is done under a fault."""
        self.proxy.arm(fault)
        error = attempt(work)
        self.proxy.arm(no_fault)
        return error

    def hasty(self) -> Place:
        return replace(self, options={**self.options, "stall_s": STALL_S})

    def step_there(self, path: str | None = None) -> int | None:
        """Which checkpoint is there, whole; None for none."""
        path = path or self.path
        try:
            stored = checkpoint.read(path, storage_options=self.straight)
        except CheckpointNotFoundError:
            return None
        step = stored.trainer_state()["step"]
        assert all(torch.equal(stored[name].full(), tensor) for name, tensor in state(step).items())
        return step

    def uploads(self) -> list[str]:
        if not self.path.startswith("s3"):
            return []
        prefix = self.path.removeprefix(f"s3://{BUCKET}/").removesuffix("c")
        filesystem = fsspec.filesystem("s3", **self.straight)
        found = filesystem.call_s3("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix)
        return [upload["Key"] for upload in found.get("Uploads", ())]


@pytest.fixture
def place(s3_server: Server, tmp_path: Path) -> Iterator[Place]:
    with behind(s3_server.endpoint, conditions=s3_server.folder) as proxy:
        options = through(s3_server.options, proxy)
        yield Place(f"{s3_server.url}/{tmp_path.name}/c", proxy, options, s3_server.options)


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


def sample_of(total: int, full_run: bool, every: int, first: int = 1) -> range:
    """The numbers of the requests that are tried: all in the full run, or one of so many."""
    return range(1, total + 1) if full_run else range(first, total + 1, every)


def in_ci(*some: Any, of: Iterable[Any]) -> list[Any]:
    """These parameters are tried by default, the others in the long run."""

    def in_the_long_run(one: Any) -> Any:
        return pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.long)

    return [one if one in some else in_the_long_run(one) for one in of]


def entered(ledger: Ledger, fault: str, tried: int, lost: list[str], sample: bool = False) -> None:
    ledger(GROUP, fault, tried=tried, lost=lost, sample=sample)


def save_under(place: Place, faults: list[tuple[int, FaultOf]], saver: Place, outlasted: bool) -> list[str]:
    """Overwrite a checkpoint once under each fault; returns what didn't hold."""
    lost = []
    place.proxy.arm(no_fault)
    place.save(0)
    before = 0
    for number, (at, fault) in enumerate(faults, start=1):
        error = place.under(fault, lambda step=number: saver.save(step))
        there = place.step_there()
        if there != number and (outlasted or error is None or there != before):
            lost.append(f"request {at}: after saving {number} over {before}, {there} is there, {error!r}")
        before = number if there is None else there
    return lost + left_over(place, before)


def left_over(place: Place, step: int) -> list[str]:
    """Uploads that the next save doesn't free, when they are old."""
    with mock.patch.object(catalog, "LEFTOVER_AGE_S", -3600.0):
        place.save(step)
    return [f"an upload is left over: {upload}" for upload in place.uploads()]


SAVES = [
    *((fault, False, 3, 1) for fault in PASSING),
    *((fault, True, 3, 1) for fault in (*PASSING, *FINAL)),
    *((fault, False, 4, 1) for fault in (*FINAL, *WRONG)),
    *((fault, False, 12, 4) for fault in HANGING),
    ("stall", True, 30, 15),
]
"""A fault, whether it lasts, and of a sample: one of so many requests, from which one on."""
SAVES_IN_CI = [("lost", False, 3, 1), ("expired", True, 3, 1), ("shifted", False, 4, 1), ("stall", False, 12, 4)]


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize(("fault", "lasts", "every", "first"), in_ci(*SAVES_IN_CI, SAVES[-1], of=SAVES))
def test_a_save_leaves_the_earlier_checkpoint_or_the_new_one(
    fault: Fault, lasts: bool, every: int, first: int, place: Place, ledger: Ledger, full_run: bool
) -> None:
    """One outlasts what passes at once. Under a stall it may fail on a busy machine, which answers no sooner."""
    place.save(0)
    total = count_requests(place, lambda: place.save(0))
    make = from_then_on if lasts else once
    faults = [(number, make(number, fault)) for number in sample_of(total, full_run, every, first)]
    assert faults
    saver = place.hasty() if fault in HANGING else place
    lost = save_under(place, faults, saver, outlasted=not lasts and fault in PASSING)
    when = "from one request on" if lasts else "at one request"
    entered(ledger, f"S3, a save: {fault} {when}, each in turn", len(faults), lost, sample=not full_run)


@pytest.mark.parametrize("fault", in_ci("expired", of=["expired", 500, "reset"]))
def test_a_first_save_that_fails_leaves_no_checkpoint(
    fault: Fault, place: Place, ledger: Ledger, full_run: bool
) -> None:
    path = place.path
    total = count_requests(place, lambda: place.save(0, f"{path}-0"))
    numbers = sample_of(total, full_run, every=4)
    lost = []
    for number in numbers:
        error = place.under(from_then_on(number, fault), lambda new=f"{path}-{number}": place.save(7, new))
        there = place.step_there(f"{path}-{number}")
        if there != 7 and (error is None or there is not None):
            lost.append(f"request {number}: {there} is there, {error!r}")
    what = f"S3, a first save: {fault} from one request on, each in turn"
    entered(ledger, what, len(numbers), lost, sample=not full_run)


@pytest.mark.parametrize("fault", in_ci("cut", *WRONG, "late", of=[*PASSING, *FINAL, *WRONG, *HANGING]))
def test_a_load_is_right_or_refused(fault: Fault, place: Place, ledger: Ledger, full_run: bool) -> None:
    place.save(3)
    hangs = fault in HANGING
    loader = place.hasty() if hangs else place

    def load(by: Place = loader) -> None:
        by.load(3)
        if not hangs:  # the state's requests are no others
            assert checkpoint.read(by.path, storage_options=by.options).trainer_state() == {"step": 3}

    numbers = sample_of(count_requests(place, lambda: load(place)), full_run, every=4 if hangs else 2)
    errors = {number: place.under(once(number, fault), load) for number in numbers}
    lost = [f"request {number}: {error!r}" for number, error in errors.items() if error and fault in PASSING]
    if hangs and place.under(from_then_on(1, fault), load) is None:
        lost.append("loaded, though nothing was answered")
    entered(ledger, f"S3, a load: {fault} at one request, each in turn", len(numbers) + hangs, lost, not full_run)


def test_a_server_that_dies_in_mid_save_is_an_error_and_the_earlier_checkpoint_is_whole(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "data") as server:
        path = f"{server.url}/c"
        checkpoint.save(state(0), path, storage_options=server.options)

        def die(number: int, method: str, url: str) -> None:
            if "partNumber=2" in url:
                server.kill()

        with behind(server.endpoint, die) as proxy, pytest.raises((CheckpointError, OSError)):
            checkpoint.save(state(1), path, storage_options=through(server.options, proxy))
    with serve("s3", tmp_path / "data") as server:
        assert torch.equal(checkpoint.read(path, storage_options=server.options)["large"].full(), state(0)["large"])
        assert checkpoint.verify(path, storage_options=server.options).ok


# -- gather ------------------------------------------------------------------------------------------------------------

GATHERS = [(fault, lasting) for lasting in (False, True) for fault in (*PASSING, *FINAL)]


@pytest.mark.parametrize(("fault", "lasting"), in_ci(("lost", False), ("expired", True), of=GATHERS))
def test_a_gather_replaces_a_file_as_a_whole(
    fault: Fault, lasting: bool, place: Place, ledger: Ledger, full_run: bool
) -> None:
    """The earlier file is of the same length, so that it could be taken for a lost upload's success."""
    base = place.path.rpartition("/")[0]
    out = f"{base}/model.safetensors"
    whole: list[bytes] = []
    for step in (0, 1):
        place.save(step, f"{base}/step-{step}")

    straight = open_store(base, place.straight)
    total = 0
    for step in (0, 1):
        total = count_requests(place, lambda step=step: place.gather(out, f"{base}/step-{step}"))
        whole.append(straight.read("model.safetensors"))
    assert len(whole[0]) == len(whole[1])
    assert whole[0] != whole[1]
    lost = []
    before = 1
    numbers = sample_of(total, full_run, every=2)
    for number in numbers:
        new = f"{base}/step-{1 - before}"
        error = place.under((from_then_on if lasting else once)(number, fault), lambda new=new: place.gather(out, new))
        if error is not None and not isinstance(error, CheckpointError):
            lost.append(f"request {number}: {error!r} is none of ours")
        there = straight.read("model.safetensors")
        if there != whole[1 - before] and (error is None or there != whole[before]):
            lost.append(f"request {number}: {len(there)} bytes are there, {error!r}")
        elif not lasting and fault in PASSING and error is not None:
            lost.append(f"request {number}: {error!r}")
        before = whole.index(there) if there in whole else before
    # the lost answer to the beginning of an upload, which can't be told from another job's, leaves one
    if not lasting and len(uploads := place.uploads()) > 1:
        lost.append(f"uploads are left over: {uploads}")
    when = "from one request on" if lasting else "at one request"
    what = f"S3, a gather: {fault} {when}, each in turn"
    entered(ledger, what, len(numbers), lost, sample=not full_run)


# -- ranks -------------------------------------------------------------------------------------------------------------


def save_and_gather_with_a_bad_rank(
    path: str, endpoint: str, options: dict[str, Any], served: str, faulty: int, cases: list[tuple[int, Fault, bool]]
) -> list[str]:
    """Each rank has a proxy of its own; that of one has faults."""
    use_small_parts(pytest.MonkeyPatch())
    rank = distributed.get_rank()
    lost = []
    with behind(endpoint, conditions=Path(served)) as proxy:
        place = Place(path, proxy, through(options, proxy), options)
        place.save(0)
        for step, (number, fault, stays) in enumerate(cases, start=1):
            before = place.step_there()
            distributed.barrier()
            works = (
                lambda step=step: place.save(step),
                lambda step=step: place.gather(f"{path}-{step}.safetensors"),
            )
            for gathers, work in enumerate(works):
                when = (from_then_on if stays else once)(number, fault)
                error = place.under(when if rank == faulty else no_fault, work)
                distributed.barrier()
                there = place.step_there()
                right = (before,) if gathers else (step,) if error is None else (before, step)
                if there not in right:
                    lost.append(f"rank {faulty}, {fault} at {number}: {there} is there, {error!r}")
                before = there
                if fault in PASSING and not stays and error is not None:
                    lost.append(f"rank {faulty}, {fault} at {number}: {error!r}")
                distributed.barrier()
        place.save(len(cases) + 1)
        if place.step_there() != len(cases) + 1:
            lost.append("the next save isn't there")
    return lost


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("faulty", [0, pytest.param(1, marks=pytest.mark.long)])
def test_one_rank_of_two_meets_the_faults(
    faulty: int, s3_server: Server, tmp_path: Path, ledger: Ledger, full_run: bool
) -> None:
    faults: list[Fault] = [*PASSING, *FINAL] if full_run else ["reset", "expired"]
    numbers = range(1, 20) if full_run else (3,)
    cases = [(number, fault, stays) for fault in faults for number in numbers for stays in (False, True)]
    path = f"{s3_server.url}/{tmp_path.name}/c"
    arguments = (path, s3_server.endpoint, s3_server.options, str(s3_server.folder), faulty, cases)
    per_rank = run_ranks(save_and_gather_with_a_bad_rank, 2, *arguments, timeout_s=LONG_S if full_run else 60)
    lost = [line for lines in per_rank for line in lines]
    what = f"S3, two ranks save and gather, rank {faulty} meets faults"
    entered(ledger, what, 2 * len(cases), lost, sample=not full_run)


# -- WebDAV ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("fault", ["lost", 500, "half sent", "reset", "cut"])
def test_webdav_at_every_request(fault: Fault, tmp_path: Path, ledger: Ledger) -> None:
    """A server may write a put in place, and keep its half: so nothing is put under a name that is in use."""
    lost = []
    with serve("webdav", tmp_path / "data") as server, behind(server.endpoint) as proxy:
        options = through(server.options, proxy)
        path = f"{server.url}/c"
        for step in (0, 1):
            proxy.arm(no_fault)
            checkpoint.save({"w": torch.full((100,), float(step))}, path, storage_options=options)
        total, before = proxy.requests, 1.0
        for number in range(1, total + 1):
            step = float(number + 1)
            proxy.arm(once(number, fault))
            error = None
            try:
                checkpoint.save({"w": torch.full((100,), step)}, path, storage_options=options)
            except (CheckpointError, OSError) as failure:
                error = failure
            there = checkpoint.read(path, storage_options=server.options)["w"].full()
            value = float(there[0])
            if not (there == value).all() or (value != step and (error is None or value != before)):
                lost.append(f"request {number}: {value} is there after {step} over {before}, {error!r}")
            before = value
    entered(ledger, f"WebDAV, a save: {fault} at one request, each in turn", total, lost)
