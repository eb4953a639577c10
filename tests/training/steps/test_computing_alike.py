"""The numbers of threads that users set on ranks stay."""

import os

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import processors
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of


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
