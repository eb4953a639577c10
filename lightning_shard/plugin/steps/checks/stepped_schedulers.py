"""A learning-rate scheduler that a step steps itself, as some do by ``self.lr_schedulers().step()``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_shard.errors import StepError


@contextmanager
def steps_no_scheduler(schedulers: Sequence[Any], microbatches: int) -> Iterator[None]:
    """Context of a batch's steps on stages, for this number of microbatches.

    Raises:
        StepError: A scheduler was stepped, and with several microbatches more than once.
    """
    schedulers = schedulers if microbatches > 1 else []
    before = [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]
    yield
    for scheduler, count in zip(schedulers, before, strict=True):
        if getattr(scheduler, "last_epoch", None) != count:
            raise StepError(
                f"A training step steps the {type(scheduler).__name__} itself, and runs once for each of {microbatches}"
                " microbatches: leave that to the Trainer, as configure_optimizers may ask with interval='step', or do"
                " it in on_train_batch_end, or use microbatches=1 or pipeline_parallel_size=1.",
                breaks=6,
            )
