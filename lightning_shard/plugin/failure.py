"""If one rank fails, all stop, with the first cause.

The rank that fails first says so in the process group's store. The others either run into a broken connection, and
their error is given a note with the first cause, or wait in a collective that will never end: a thread on every rank
watches the store, and ends the process where its main thread doesn't end by itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

_KEY = "lightning_shard/first_failure"
_POLL_S = 1.0
_GRACE_S = 10.0


class FailureWatch:
    """Says and watches for a first failure among the ranks of one fit or evaluation; made by all ranks alike."""

    _made = 0

    def __init__(self, rank: int, address: str, port: int) -> None:
        # Ranks run the same fits in the same order; an earlier one's failure, caught and survived, isn't this one's.
        FailureWatch._made += 1
        # torchrun keeps its store over restarts.
        self._key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{FailureWatch._made}"
        self._rank = rank
        self._where = address, port
        self._store = self._connect()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lightning_shard failure watch", daemon=True)
        self._thread.start()

    def report(self, exception: BaseException) -> None:
        """Say that this rank failed; where another was first, add its cause to the exception as a note."""
        self._stopped.set()
        cause = "".join(traceback.format_exception_only(exception)).strip()
        mine = f"rank {self._rank}: {cause}"
        try:
            first = self._store.compare_set(self._key, "", mine).decode()
        except (RuntimeError, dist.DistError):
            return  # the store went away with the rank that held it
        if not first.endswith(f": {cause}"):
            exception.add_note(f"The first failure was on {first}")
        elif first == mine and self._rank == 0:
            time.sleep(2 * _POLL_S)  # the store may live in this process: let the others read it

    def stop(self) -> None:
        """Watch no longer: the job ended well."""
        self._stopped.set()

    def _connect(self) -> dist.TCPStore:
        # A connection of its own: the process group's may be held by a call that waits.
        wait = timedelta(seconds=_GRACE_S)
        return dist.TCPStore(*self._where, is_master=False, wait_for_workers=False, timeout=wait)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            first = self._look()
            if first is None:
                continue
            if self._stopped.wait(_GRACE_S):
                return
            print(
                f"[lightning_shard] rank {self._rank} stops, because another rank failed first. {first}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _look(self) -> str | None:
        """The first failure, if there was one; a lost connection is one only where no new one can be made."""
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except (RuntimeError, dist.DistError):
            pass
        try:
            self._store = self._connect()
            return None
        except (RuntimeError, dist.DistError):
            return "The process that held the process group's store is gone."
