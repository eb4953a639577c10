"""Which processors belong to a rank, and how many threads it computes with: as many as users set, where they do."""

import math
import os

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import processors
from lightning_shard.processors import Available, shares
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of

ALL = tuple(range(8))


def rank(processors=ALL, machine="a", container="a", quota=math.inf):
    return Available(machine, container, processors, quota)


SHARES = {
    "one": ([rank()], 8),
    "shared": ([rank()] * 3, 2),
    "more ranks than processors": ([rank()] * 20, 1),
    "bound by the launcher": ([rank((0, 1, 2, 3)), rank((4, 5, 6, 7))], 4),
    "partly bound": ([rank((0, 1, 2, 3)), rank((0, 1, 2, 3)), rank(ALL)], 1),
    "the fullest machine counts": ([rank()] * 2 + [rank(machine="b")], 4),
    "containers of one machine": ([rank(container="a"), rank(container="b")], 4),
    "a quota": ([rank(quota=2.0)] * 2, 1),
    "a quota for each container": ([rank(container="a", quota=3.5), rank(container="b", quota=3.5)], 3),
    "a quota below one": ([rank(quota=0.5)], 1),
}


@pytest.mark.parametrize(("ranks", "number"), SHARES.values(), ids=SHARES)
def test_a_machines_processors_are_divided_among_its_ranks(ranks, number):
    assert shares(ranks) == number


class Threads(L.Callback):
    def on_train_batch_end(self, *_):
        self.seen = torch.get_num_threads()


def fit(rank, threads):
    """Fit with numbers of threads that were set on the ranks; returns that of the run, and that after it."""
    torch.set_num_threads(threads[rank] or len(processors.Available.here().processors))
    callback = Threads()
    trainer = trainer_of({}, max_steps=1, callbacks=[callback])
    trainer.fit(BoringModel())
    return callback.seen, torch.get_num_threads()


def on_ranks():
    rank = int(os.environ["RANK"])
    default = len(processors.Available.here().processors)
    assert fit(rank, [5, 5]) == (5, 5)
    assert fit(rank, [None, 6])[0] == 6, "no number is set on rank 0"
    within, after = fit(rank, [7, 9])
    assert within == after == [7, 9][rank]
    assert fit(rank, [None, None]) == (processors.shares([processors.Available.here()] * 2), default)


def test_numbers_of_threads_that_users_set_stay():
    run_ranks(on_ranks, 2, elastic=True)
