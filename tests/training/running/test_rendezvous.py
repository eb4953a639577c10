"""Ranks of one round find each other in a store that is full of earlier rounds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_shard.errors import RankFailure
from lightning_shard.plugin.running.rendezvous import agree

SOON = timedelta(seconds=20)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def clients(store: dist.TCPStore, count: int) -> list[dist.Store]:
    """A connection for each rank, which are threads here: one that waits holds its connection."""
    return [dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False) for _ in range(count)]


def round_of(store: dist.TCPStore, world_size: int, late: int | None = None) -> set[str]:
    """The names that the ranks of a round have agreed on; ``late`` comes after the others have looked around."""

    def come(rank: int, client: dist.Store) -> str:
        if rank == late:
            time.sleep(0.3)
        return agree(client, rank, world_size, SOON)

    with ThreadPoolExecutor(world_size) as threads:
        return set(threads.map(come, range(world_size), clients(store, world_size)))


@pytest.mark.parametrize("late", [None, 0, 1])
def test_each_round_has_a_name_of_its_own_whoever_comes_last(store: dist.TCPStore, late: int | None) -> None:
    rounds = [round_of(store, world_size, late) for world_size in (4, 2, 2, 3, 4)]
    assert all(len(names) == 1 for names in rounds)
    assert len(set.union(*rounds)) == len(rounds)


def test_a_round_that_was_cut_off_misleads_nobody(store: dist.TCPStore) -> None:
    """Rank 1 asks and is gone; rank 2 waits in vain for that round's rank 0, which doesn't come."""
    left = clients(store, 2)
    for rank, client in enumerate(left, start=1):
        with pytest.raises(RankFailure, match="without rank 0"):
            agree(client, rank, 3, timedelta(seconds=0.2))
    assert len(round_of(store, 3, late=1)) == 1


def test_rank_0_waits_for_the_processes_of_now_and_names_who_is_missing(store: dist.TCPStore) -> None:
    assert len(round_of(store, 3)) == 1
    leader, second = clients(store, 2)
    outcome: Future[str] = Future()

    def lead() -> None:
        try:
            outcome.set_result(agree(leader, 0, 3, timedelta(seconds=1)))
        except RankFailure as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=lead)
    thread.start()
    agree(second, 1, 3, SOON)
    thread.join()
    with pytest.raises(RankFailure, match=r"without ranks \[2\] of 3"):
        outcome.result()
