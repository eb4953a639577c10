"""Ends an IterableDataset on all data ranks when the first rank's part ends.

Each data rank reads its own part. A rank that went on alone would wait for the others forever. Private in torch 2.13,
used here: ``DataLoader._get_iterator``, see ``loader.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

from lightning_shard.checkpoint.ranks import Ranks


def end_together(dataloader: Any, ranks: Ranks) -> None:
    """Make all ranks take the same number of batches of their DataLoaders. Taking a batch becomes a collective call."""
    alone = dataloader._get_iterator
    dataloader._get_iterator = lambda: _EndingTogether(alone(), ranks)
    dataloader._ends_together = True


def iterates_collectively(dataloader: Any) -> bool:
    """Whether taking a batch is a collective call over all ranks, so that they must do it at the same time."""
    return getattr(dataloader, "_ends_together", False)


class _EndingTogether:
    """Yields a rank's batches as long as every rank has one."""

    def __init__(self, batches: Iterator[Any], ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._count = 0

    def __iter__(self) -> _EndingTogether:
        return self

    def __next__(self) -> Any:
        own = list(islice(self._batches, 1))
        [one_has_ended] = self._ranks.any(not own)
        if one_has_ended:
            if own:
                warnings.warn(
                    f"The IterableDataset of another data rank ended after {self._count} batches, but this rank's has"
                    " more. They are dropped, since all ranks must take the same number of steps. To read all samples,"
                    " have the dataset give equally many on each data rank.",
                    stacklevel=2,
                )
            raise StopIteration
        self._count += 1
        return own[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)
