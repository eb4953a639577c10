"""All ranks of a pipeline and of a tensor group must read the same batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lightning_shard.errors import BatchError
from lightning_shard.layout import Layout
from lightning_shard.pipeline import tree


def check_same_batch(batch: Any, layout: Layout) -> None:
    """Compare a batch's bytes over the ranks of one data rank; a collective call over all ranks.

    The strategy's own sampler sees to it. A dataset or sampler that deals by global rank doesn't, and every number
    after it would be wrong without anything failing.

    Raises:
        BatchError: On every rank, where two ranks of a data rank have read other values.
    """
    if layout.world_size == layout.data_parallel_size:
        return
    digests: list[str] = [""] * layout.world_size
    dist.all_gather_object(digests, _digest(batch))
    first: dict[int, int] = {}
    for rank, digest in enumerate(digests):
        data_rank = layout.at(rank).data_rank
        other = first.setdefault(data_rank, rank)
        if digest != digests[other]:
            raise BatchError(
                f"Ranks {other} and {rank} hold parts of one model and read data rank {data_rank}'s batches, but their"
                " batches differ: a dataset or sampler that deals by global rank must deal by data rank instead"
                " (trainer.strategy.layout.data_rank of data_parallel_size)."
            )


def _digest(batch: Any) -> str:
    digest = xxhash.xxh3_128()
    for path, leaf in tree.walk(batch):
        digest.update("/".join(path).encode())
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, (str, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
