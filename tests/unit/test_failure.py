"""The first failure is told to all ranks, and only the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from lightning_shard.plugin.failure import FailureWatch


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureWatch]]:
    """Those of two ranks, which in one process would count as two fits."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []
    for rank in range(2):
        monkeypatch.setattr(FailureWatch, "_made", 0)
        made.append(FailureWatch(rank, "127.0.0.1", store.port))
    yield made
    for watch in made:
        watch.stop()


def test_the_others_learn_the_first_cause(watches: list[FailureWatch]) -> None:
    first, other = ValueError("a bad batch"), RuntimeError("connection closed")
    assert watches[0]._look() is None
    watches[1].report(first)
    assert watches[0]._look() == "rank 1: ValueError: a bad batch"
    watches[0].report(other)
    assert other.__notes__ == ["The first failure was on rank 1: ValueError: a bad batch"]
    assert not hasattr(first, "__notes__")


def test_the_same_error_on_every_rank_needs_no_note(watches: list[FailureWatch]) -> None:
    errors = [ValueError("sizes that don't divide") for _ in watches]
    for watch, error in zip(watches, errors):
        watch.report(error)
    assert not any(hasattr(error, "__notes__") for error in errors)


def test_a_later_fit_isnt_stopped_by_a_failure_that_was_survived(watches: list[FailureWatch]) -> None:
    watches[1].report(ValueError("caught"))
    later = FailureWatch(0, *watches[0]._where)
    assert later._look() is None
    later.stop()
