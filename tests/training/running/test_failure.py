"""The first failure is told to all ranks, and only the first; ranks that say nothing are found out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_shard.errors import RankFailure
from lightning_shard.plugin.running import failure
from lightning_shard.plugin.running.failure import FailureWatch
from lightning_shard.plugin.running.rendezvous import Rendezvous

LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:402."


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureWatch]]:
    """Those of three ranks, which in one process would count as three fits."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(failure, "_POLL_S", 0.05)
    monkeypatch.setattr(failure, "_SETTLE_S", 1.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []
    for rank in range(3):
        monkeypatch.setattr(FailureWatch, "_made", 0)
        made.append(FailureWatch(Rendezvous("127.0.0.1", store.port, rank, 3, timedelta(seconds=10))))
    yield made
    for watch in made:
        watch.stop()


def test_a_lost_connection_is_laid_to_the_rank_that_failed(watches: list[FailureWatch]) -> None:
    watches[1].report(ValueError("a bad batch"))
    watches[0].report(lost := RuntimeError(LOST))
    named = watches[0].failure_elsewhere(lost)
    assert isinstance(named, RankFailure)
    assert "rank 0 lost the others. The first failure was on rank 1: ValueError: a bad batch" in str(named)


def die(watch: FailureWatch) -> None:
    """As its thread stops with its process."""
    watch.stopped.set()
    watch._thread.join()


@pytest.mark.parametrize("ended", [[], [1]], ids=["others run", "another one's run has ended well"])
def test_a_rank_without_a_sign_of_life_is_named(ended: list[int], watches: list[FailureWatch]) -> None:
    for rank in ended:
        watches[rank].stop()
    die(watches[2])
    watches[0].report(lost := RuntimeError(LOST))
    assert "The first failure was on rank 2: no sign of life" in str(watches[0].failure_elsewhere(lost))


def test_a_rank_that_hangs_is_named_with_its_place(watches: list[FailureWatch]) -> None:
    watches[1]._store.set(watches[1]._key("lost", 1), "1")  # it has lost the others too
    watches[0].report(lost := dist.DistBackendError("timed out"))
    said = str(watches[0].failure_elsewhere(lost))
    assert "The first failure was on rank 2: alive, but not in the collective that the others waited in" in said
    assert "rank 2 is at " in said


def test_a_later_fit_isnt_stopped_by_a_failure_that_was_survived(watches: list[FailureWatch]) -> None:
    watches[1].report(ValueError("caught"))
    later = FailureWatch(watches[0]._rendezvous)
    assert later._look() is None
    later.stop()


def asked(watches: list[FailureWatch], *positions: str) -> list[str]:
    with ThreadPoolExecutor(len(positions)) as threads:
        return list(threads.map(lambda watch, position: watch.agree_to_save(position), watches, positions))


def fail_on_all(watches: list[FailureWatch], error: Exception | None = None) -> None:
    for watch in watches:
        watch.report(error or ValueError("on all"))


def test_ranks_at_different_steps_save_nothing(watches: list[FailureWatch]) -> None:
    fail_on_all(watches)
    whys = asked(watches, "in batch 4", "in batch 4", "in batch 5")
    assert whys == ["rank 0 is in batch 4, and rank 2 in batch 5"] * 3
    assert watches[1].agree_to_save("in batch 4") == whys[0]  # nobody waits once more


def test_what_one_rank_saves_alone_is_not_saved(watches: list[FailureWatch]) -> None:
    fail_on_all(watches)
    for watch in watches[1:]:
        watch.leave(0)
    assert asked(watches, "in batch 4") == ["rank 1 doesn't save"]


def test_a_rank_that_does_not_answer_is_waited_for_only_so_long(
    watches: list[FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_ANSWER_S", 0.2)
    die(watches[2])
    fail_on_all(watches[:2])
    assert asked(watches, "in batch 4", "in batch 4") == ["rank 2 didn't answer within 0 s"] * 2


def test_a_rank_that_has_not_failed_is_named_with_its_place(
    watches: list[FailureWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure.os, "_exit", lambda _: None)
    fail_on_all(watches[:2])
    whys = asked(watches, "in batch 4", "in batch 4")
    assert whys[0] == whys[1]
    assert whys[0].startswith("rank 2 is at ")
