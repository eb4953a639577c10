"""Lets pipeline stages run evaluation batches ahead of time, so that the pipeline stays full from batch to batch.

A stage that ``n`` stages follow runs up to ``n`` batches before their results are known. Every stage gets results, and
runs the hooks that receive them, in order. The last stage, on rank 0, never runs ahead. But on other stages the hooks
between two batches run after steps that come later in one process. So nothing runs ahead if the user has such hooks.

Private in Lightning 2.6, used here: ``_data_fetcher`` of the evaluation loops, which each loop looks up when it begins,
and how the loops build a step's arguments (``_build_kwargs``, ``_build_step_args_from_hook_kwargs``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from lightning_shard.plugin.steps.loop import has_hooks, is_overridden

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

Arguments = tuple[Any, ...]


def runs_in_order(trainer: pl.Trainer, module: pl.LightningModule, method: str) -> bool:
    """Whether user code runs between two steps, and may change what a step reads."""
    if has_hooks(trainer, module, [f"on_{method.removesuffix('_step')}_batch_{end}" for end in ("start", "end")]):
        return True
    holders = [holder for holder in (module, getattr(trainer, "datamodule", None)) if holder is not None]
    return any(is_overridden(holder, name, DataHooks) for holder in holders for name in _TRANSFERS)


class BatchesAhead:
    """Replaces a loop's data fetcher, and gives access to batches before the loop asks for them.

    Args:
        loop: The evaluation loop, which reads its loaders one after the other.
        prepare: What the loop does with a batch before the step; must be idempotent.
    """

    def __init__(self, loop: Any, method: str, prepare: Callable[[Any, int], Any]) -> None:
        self._fetcher = loop._data_fetcher
        self._loop = loop
        self._method = method
        self._prepare = prepare
        self._taken: deque[tuple[tuple[Any, int, int], bool]] = deque()
        self._has_ended = False
        self.done = self._fetcher.done

    @classmethod
    def install(cls, loop: Any, method: str, prepare: Callable[[Any, int], Any]) -> BatchesAhead | None:
        """Install one, if the loop fetches each batch itself. The loop looks up its fetcher only after this."""
        if type(loop._data_fetcher) is not _PrefetchDataFetcher or loop._combined_loader._mode != "sequential":
            return None
        loop._data_fetcher = cls(loop, method, prepare)
        return loop._data_fetcher

    def __iter__(self) -> BatchesAhead:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if not self._taken and not self._take():
            raise StopIteration
        item, self.done = self._taken.popleft()
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    @property
    def batches(self) -> list[Any]:
        """The prefetched batches, as a data fetcher lists them."""
        return [*(item for item, _ in self._taken), *self._fetcher.batches]

    def upcoming(self) -> Iterator[Arguments]:
        """Yield the arguments of the steps after the current one; fetches batches lazily."""
        place = 0
        while place < len(self._taken) or self._take():
            (batch, batch_idx, loader_idx), done = self._taken[place]
            batch = self._prepare(batch, loader_idx)
            self._taken[place] = (batch, batch_idx, loader_idx), done
            several = self._loop.num_dataloaders > 1
            kwargs = self._loop._build_kwargs(batch, batch_idx, loader_idx if several else None)
            yield self._loop._build_step_args_from_hook_kwargs(kwargs, self._method)
            place += 1

    def _take(self) -> bool:
        """Fetch one more batch, if there is one."""
        if self._has_ended:
            return False
        try:
            item = next(self._fetcher)
        except StopIteration:
            self._has_ended = True
            self.done |= not self._taken  # otherwise the current batch isn't the last
            return False
        self._taken.append((item, self._fetcher.done))
        return True
