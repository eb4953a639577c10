"""What all tests share: one server of forks, which imports the heavy packages once per session; and a ledger of the
faults that were tried, of which docs/reliability.md is made.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest
import torch
import torch.distributed as dist

from lightning_shard.testing import preload
from tests import needs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of `make test &` in a script: tests send it to processes
    signal.signal(signal.SIGINT, signal.default_int_handler)

preload(
    "recipes.plans",
    "s3fs",
    "tests.parity",
    "torch.distributed.pipelining",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)

torch.set_num_threads(1)  # tests run beside each other, and ranks have one thread, too

# a loaded machine is no failure
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

needs.watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function):
            needs.mark(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    needs.running[:] = [item]
    try:
        return (yield)
    finally:
        needs.running.clear()


LEDGER = "RELIABILITY_LEDGER"
"""The variable that names a folder to keep the ledger in; without it nothing is kept."""


def _free_port() -> int:
    """Below those that connections are given on Linux, any of which may take one between this look and its use."""
    # not of the seeded generator, which all workers of a session have alike
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("none of 100 ports is free")


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """A port for the test and for the programs that it starts; nothing of a run is left for the tests after it.

    Lightning writes a run's port and rank to the environment and keeps its process group: a script that a later test
    starts would take itself for one of that run's ranks, or listen where this process still does.
    """
    with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``ledger(group, fault, tried=, lost=0, note="")``: one row, of a fault tried at so many points.

    ``group`` is a heading such as "Crash"; ``fault`` says what was done to what, in one line; ``lost`` counts the
    points after which something that was promised did not hold, or tells of each what. The row is kept first, then
    nothing must be lost. ``sample`` says that a longer test tries all points of this row.
    """

    def enter(
        group: str,
        fault: str,
        *,
        tried: int,
        lost: int | list[str] = 0,
        note: str = "",
        sample: bool = False,
    ) -> None:
        assert tried > 0, f"{fault}: nothing was tried"
        if isinstance(lost, list):
            print(*lost, sep="\n")  # pytest shows it with the failure
            lost = len(lost)
        if folder := os.environ.get(LEDGER):
            row = {
                "group": group,
                "fault": fault,
                "tried": tried,
                "lost": lost,
                "note": note,
                "sample": sample,
                "test": request.node.nodeid,
            }
            with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        assert lost == 0, f"{fault}: {lost} of {tried} did not hold"

    return enter
