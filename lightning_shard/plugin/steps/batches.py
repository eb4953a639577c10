"""Splits batches into microbatches: how many, and what can't be split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_shard import tree
from lightning_shard.plugin import trainer_private


class Batches:
    """Splits the batches of one module.

    Args:
        microbatches: Of a whole batch.
    """

    def __init__(self, module: pl.LightningModule, microbatches: int) -> None:
        self._module = module
        self._microbatches = microbatches
        self._whole: int | None = None

    def split(self, batch: Any) -> list[Any]:
        """Split a training batch; one smaller than the first batch (an epoch's last) may have fewer microbatches.

        Raises:
            BatchError: The batch doesn't divide into the microbatches.
        """
        if self._microbatches == 1:
            return [batch]
        size = tree.batch_size(batch)
        self._whole = self._whole or size
        self._refuse_list_of_samples(batch, may_be_last=size < self._whole)
        return tree.split(batch, self._microbatches if size >= self._whole else self._most_parts(batch))

    def split_evaluated(self, batch: Any) -> list[Any]:
        """Split an evaluation's batch, into fewer microbatches if it doesn't divide."""
        self._refuse_list_of_samples(batch, may_be_last=True)
        return tree.split(batch, self._most_parts(batch))

    def _refuse_list_of_samples(self, batch: Any, *, may_be_last: bool) -> None:
        trainer = self._module.trainer
        if self._microbatches > 1 and not trainer_private.stacks_samples(trainer):
            tree.refuse_list_of_samples(batch, trainer_private.samples_drawn(trainer), may_be_last=may_be_last)

    def _most_parts(self, batch: Any) -> int:
        if self._microbatches == 1:
            return 1
        size = tree.batch_size(batch)
        return max(n for n in range(1, self._microbatches + 1) if size % n == 0)
