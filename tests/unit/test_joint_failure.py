"""A run of code that fails is left out where it fails on all ranks, and its error is raised where it fails on some."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from lightning_shard.plugin.running import joint_failure
from lightning_shard.plugin.running.joint_failure import Attempts


def outcomes(errors: Sequence[Exception | None], *, absent: int = 0) -> list[str]:
    """What comes of a run by ranks of which each has its error, or none; ``absent`` ones more don't end theirs."""
    store = dist.HashStore()
    ranks = range(len(errors) + absent)
    attempts = []
    for rank in ranks:
        Attempts._series = 0  # each rank has a process of its own
        attempts.append(Attempts(lambda _: store, rank, ranks))

    def run(rank: int) -> str:
        try:
            with attempts[rank].at("block"):
                if (error := errors[rank]) is not None:
                    raise error
        except Exception as raised:
            return f"{raised}, {len(getattr(raised, '__notes__', ()))} notes"
        return "went on"

    with ThreadPoolExecutor(len(errors)) as threads:
        return list(threads.map(run, range(len(errors))))


def test_what_fails_on_all_ranks_is_left_out() -> None:
    assert outcomes([ValueError("one"), ValueError("two"), IndexError("three")]) == ["went on"] * 3


def test_what_fails_on_one_rank_is_raised_there() -> None:
    assert outcomes([None, ValueError("alone"), None]) == ["went on", "alone, 1 notes", "went on"]


def test_a_rank_that_waits_in_the_run_counts_as_one_that_didnt_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_failure, "_WAIT_S", 0.2)
    assert outcomes([ValueError("a"), ValueError("b")], absent=1) == ["a, 1 notes", "b, 1 notes"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), RuntimeError("gloo/transport: closed")])
def test_what_isnt_of_the_code_is_raised_at_once(error: Exception) -> None:
    assert outcomes([error], absent=1) == [f"{error}, 0 notes"]


def test_what_ranks_said_of_an_earlier_run_isnt_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_failure, "_WAIT_S", 0.2)
    store = dist.HashStore()
    attempts = Attempts(lambda _: store, 0, range(2))
    store.set(f"{attempts._prefix}/block/1/1", "failed")
    with attempts.at("block"):
        raise ValueError("on both")
    with pytest.raises(ValueError, match="here"), attempts.at("block"):
        raise ValueError("here")
