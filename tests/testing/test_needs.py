"""What a test needs is a marker: found by what its code reaches, and checked where a process starts."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_shard.testing import ranks, run_ranks
from tests import needs
from tests.servers import serve

STARTS: dict[str, Callable[[], Any]] = {
    "os.system": lambda: os.system("true"),
    "os.fork": lambda: os.fork() or os._exit(0),
    "subprocess": lambda: importlib.import_module("subprocess").run(["true"], check=True),
    "workers": lambda: next(iter(DataLoader(range(2), num_workers=1))),
    "fork server": lambda: importlib.import_module("multiprocessing").get_context("forkserver").Process().start(),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=list(STARTS))
def test_a_test_that_starts_a_process_and_is_not_marked_fails(start: Callable[[], Any]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"starts a process \(.*@pytest.mark.ranks"):
        start()


@pytest.mark.ranks
def test_a_marked_test_may_start_a_process() -> None:
    assert os.system("true") == 0


def on_ranks() -> list[Any]:
    return run_ranks(os.getpid, 2)


@ranks(2)
def decorated() -> None:
    pass


def on_a_server() -> None:
    with serve("s3", Path()):
        on_ranks()


class InAClass:
    def method(self) -> list[Any]:
        return [on_ranks() for _ in range(2)]


def test_markers_are_those_of_the_harnesses_that_are_reached() -> None:
    assert needs.reached(on_ranks) == needs.reached(decorated) == needs.reached(InAClass) == {"ranks"}
    assert needs.reached(functools.partial(on_ranks)) == needs.reached(InAClass().method) == {"ranks"}
    assert needs.reached(on_a_server) == {"ranks", "server"}
    assert needs.reached(os.getpid, needs.reached, "on_ranks", None) == set()
