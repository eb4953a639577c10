"""What users set on ranks stays, and is compared between them."""

import os
import warnings

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shard import HybridShardStrategy, processors
from lightning_shard.testing import run_ranks
from tests.parity import QUIET


class Threads(L.Callback):
    def on_train_batch_end(self, *_):
        self.seen = torch.get_num_threads()


def fit(rank, threads, **settings):
    """Fit with numbers of threads that were set on the ranks; returns that of the run, that after it, and warnings."""
    torch.set_num_threads(threads[rank] or len(processors.Available.here().processors))
    callback = Threads()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(
            strategy=HybridShardStrategy(), devices=2, max_steps=1, callbacks=[callback], **QUIET, **settings
        )
        trainer.fit(BoringModel())
    said = [str(each.message) for each in caught if "different settings" in str(each.message)]
    return callback.seen, torch.get_num_threads(), said


def on_ranks():
    rank = int(os.environ["RANK"])
    default = len(processors.Available.here().processors)
    assert fit(rank, [5, 5]) == (5, 5, [])
    assert fit(rank, [None, 6])[::2] == (6, []), "no number is set on rank 0"
    within, after, said = fit(rank, [7, 9])
    assert within == after == [7, 9][rank]
    if rank == 0:
        assert "torch.get_num_threads() is 7 on rank 0, 9 on rank 1" in said[0]
    torch.set_float32_matmul_precision("medium" if rank else "high")
    torch.backends.cudnn.benchmark = bool(rank)
    within, after, said = fit(rank, [None, None])
    assert (within, after) == (processors.shares([processors.Available.here()] * 2), default)
    if rank:
        assert not said
        return
    assert len(said) == 1
    assert "torch.get_float32_matmul_precision() is high on rank 0, medium on rank 1" in said[0]
    assert "torch.backends.cudnn.benchmark is False on rank 0, True on rank 1" in said[0]
    assert "get_num_threads" not in said[0]


def test_settings_of_users_stay_and_are_compared():
    run_ranks(on_ranks, 2, elastic=True)
