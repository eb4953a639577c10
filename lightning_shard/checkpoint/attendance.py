"""Finds which ranks are missing when a collective fails, so that the error can name them.

gloo reports that a connection was closed or timed out, but not which rank caused it. So each rank counts the exchanges
that it joins, in the process group's store. When an exchange fails, the others read these counts.

Private part of torch 2.11 to 2.14: ``distributed_c10d._get_process_group_store``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import distributed_c10d

GRACE_S = 1.0
"""Time for slower ranks to join before the counts are read."""
ANSWER_S = 5.0
"""Limit for reading the store, which may live in the process that has ended or is stopped."""
_PREFIX = "lightning_shard/exchanges"

_of_groups: WeakKeyDictionary[Any, Attendance] = WeakKeyDictionary()


class Attendance:
    """Counts of the exchanges that each rank of one process group has joined."""

    def __init__(self, group: Any, rank: int, members: Sequence[int]) -> None:
        self._store = distributed_c10d._get_process_group_store(group)  # None for some backends, such as MPI
        self._lost = False
        self._rank = rank
        self._members = members
        self._count = 0

    @classmethod
    def of(cls, group: Any, rank: int, members: Sequence[int]) -> Attendance:
        known = _of_groups.get(group)
        if known is None:
            known = _of_groups[group] = cls(group, rank, members)
        return known

    def come(self) -> None:
        """Record that this rank joins the next exchange; doesn't wait for the others."""
        self._count += 1
        if self._store is None or self._lost:
            return  # a store that failed to answer once may block the next caller
        with contextlib.suppress(RuntimeError):  # the exchange itself will raise
            self._store.set(f"{_PREFIX}/{self._rank}", str(self._count))

    def account(self) -> str:
        """After a failed exchange: a text that says which ranks didn't join it, as far as that can be known."""
        if self._store is None:
            return "which ranks are missing isn't known"
        self._lost = True
        counts: dict[int, int] = {}
        thread = threading.Thread(target=self._read, args=(counts,), daemon=True)
        thread.start()
        thread.join(GRACE_S + ANSWER_S)
        if len(counts) < len(self._members):
            return "the process that holds the process group's store (mostly rank 0) is gone or doesn't answer"
        fewest = min(counts.values())
        absent = [rank for rank, count in counts.items() if count == fewest]
        if fewest >= self._count:
            return "all ranks joined the collective, and the connection to one broke during it"
        named = ", ".join(map(str, absent[:8])) + (" …" if len(absent) > 8 else "")
        if len(absent) == 1:
            return f"rank {named} didn't join the collective: it has ended, was stopped, or hangs"
        return f"ranks {named} didn't join the collective: they have ended, were stopped, or hang"

    def _read(self, counts: dict[int, int]) -> None:
        threading.Event().wait(GRACE_S)
        try:
            for rank in self._members:
                key = f"{_PREFIX}/{rank}"
                counts[rank] = int(self._store.get(key)) if self._store.check([key]) else 0
        except RuntimeError:
            counts.clear()
