"""Evaluations fill the pipeline over batches, as within them: which batches a stage may take before their turn.

With ``n`` stages after it, a stage has taken up to ``n`` batches whose results aren't known yet. Results, and hooks
with them, come in order on every stage; the last one, on rank 0, never runs ahead. But on others what hooks between two
batches do would come after steps that one process runs later. So it isn't done where a user has such hooks.

Private parts of Lightning 2.6 used here: ``_data_fetcher`` of the evaluation loops, which they look up when they begin,
and how these make a step's arguments (``_build_kwargs``, ``_build_step_args_from_hook_kwargs``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from lightning_shard.plugin.steps.used_hooks import has_hooks, is_overridden

_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

Arguments = tuple[Any, ...]


def runs_in_order(trainer: pl.Trainer, module: pl.LightningModule, method: str) -> bool:
    """Whether code of a user's runs between two steps, and may change what a step finds."""
    if has_hooks(trainer, module, [f"on_{method.removesuffix('_step')}_batch_{end}" for end in ("start", "end")]):
        return True
    holders = [holder for holder in (module, getattr(trainer, "datamodule", None)) if holder is not None]
    return any(is_overridden(holder, name, DataHooks) for holder in holders for name in _TRANSFERS)


class BatchesAhead:
    """In place of a loop's data fetcher: the batches to come can be had before their turn.

    Args:
        loop: That evaluates; its batches come one loader after the other.
        method: The step's name.
        prepare: What the loop does with a batch before the step, which may be done twice.
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
    def put_in(cls, loop: Any, method: str, prepare: Callable[[Any, int], Any]) -> BatchesAhead | None:
        """Where the loop itself asks for each batch; the loop looks its fetcher up after this."""
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
        """What was taken before its turn, as a data fetcher has it."""
        return [*(item for item, _ in self._taken), *self._fetcher.batches]

    def upcoming(self) -> Iterator[Arguments]:
        """The arguments of the steps after the present one; batches are fetched as they are asked for."""
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
        """Fetch one more, if there is one."""
        if self._has_ended:
            return False
        try:
            item = next(self._fetcher)
        except StopIteration:
            self._has_ended = True
            self.done |= not self._taken  # else it is said of the present batch, which isn't the last
            return False
        self._taken.append((item, self._fetcher.done))
        return True
