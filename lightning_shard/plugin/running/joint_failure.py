"""Finds out whether code that may fail has failed on all of some ranks, or only on some of them.

An error on all ranks is suppressed on all. A rank that failed alone would skip collectives in which the others wait, or
meet them in later ones. It can't ask them by a collective, since they may be in one of the run's own. So each rank
writes the outcome to the process group's store, and only a rank that failed waits for the others' outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_shard.plugin.running.failure import lost_the_others
from lightning_shard.plugin.running.votes import collect

_KEY = "lightning_shard/alike"
_WAIT_S = 5.0
"""Ranks that fail at the same place get there about together, since they met in a collective just before."""
_CONNECT_S = 10.0

Connect = Callable[[timedelta], dist.Store]


class Attempts:
    """Attempts to run one module's code, made by the same ranks in the same order.

    Args:
        connect: Opens a separate connection to a store that these ranks share.
        rank: This rank.
        ranks: All ranks that take part.
    """

    _series = 0

    def __init__(self, connect: Connect, rank: int, ranks: Collection[int]) -> None:
        self._connect = connect
        # an earlier module of this process may use the same names; ranks lay out modules in the same order
        Attempts._series += 1
        self._prefix = f"{_KEY}/{Attempts._series}"
        self._rank = rank
        self._others = [other for other in ranks if other != rank]
        self._made: Counter[str] = Counter()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Run the code inside; suppress its error if all ranks have one.

        Raises:
            Exception: This rank's error, if others have none, or don't report in time.
        """
        self._made[name] += 1
        prefix = f"{self._prefix}/{name}/{self._made[name]}"
        try:
            yield
        except Exception as error:
            # errors that aren't the code's own are raised at once
            if isinstance(error, torch.OutOfMemoryError) or lost_the_others(error):
                raise
            if not self._failed_everywhere(prefix):
                error.add_note(
                    f"To check tensor_parallel_plan, {name} was run a second time without gradients (to compare it with"
                    " itself before the split). That failed on this rank, but not on all ranks."
                )
                raise
        else:
            with suppress(RuntimeError, dist.DistError):  # maybe no other rank needs the outcome
                self._connect(timedelta(seconds=_CONNECT_S)).set(f"{prefix}/{self._rank}", "passed")

    def _failed_everywhere(self, prefix: str) -> bool:
        keys = [f"{prefix}/{other}" for other in self._others]
        try:
            store = self._connect(timedelta(seconds=_CONNECT_S))
            store.set(f"{prefix}/{self._rank}", "failed")
            found = collect(store, keys, _WAIT_S, lambda outcome: outcome == "passed")
        except (RuntimeError, dist.DistError):
            return False
        return list(found.values()) == ["failed"] * len(keys)
