"""Checks that all ranks' loaders have the same length: a rank with more batches would wait for the others forever."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.errors import ConfigurationError

_BY_DATASET = {
    True: "have the dataset give equally many samples on each data rank, or leave out its __len__, and all end with the"
    " first.",
    False: "have all ranks read the same samples, which are dealt to data ranks for you; look for files that some"
    " machines lack, and for a part that is taken by rank.",
}


def check_lengths(dataloader: Any, ranks: Ranks) -> None:
    """Compare lengths; a collective call over all ranks.

    Args:
        dataloader: This rank's loader, after distribution to data ranks.

    Raises:
        ConfigurationError: On all ranks, if loaders that know their lengths have different ones.
    """
    lengths = ranks.broadcast(ranks.gather(_length(dataloader)))
    other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"A DataLoader of a {type(dataloader.dataset).__name__} gives {_shown(lengths[0])} on rank 0 and"
            f" {_shown(lengths[other])} on rank {other}, and all ranks have to take the same number of steps:"
            f" {_BY_DATASET[isinstance(dataloader.dataset, IterableDataset)]}"
        )


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None


def _shown(length: int | None) -> str:
    return "an unknown number of batches" if length is None else f"{length} batches"
