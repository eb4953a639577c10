"""Ctrl+C: all ranks end at the same point between two batches, where hooks may save; or, pressed twice, at once.

SIGINT may reach all ranks or some of them, each at another moment. Python would raise KeyboardInterrupt wherever a rank
is, so that it leaves a step in which the others wait for it. And a rank that is blocked in a collective runs no handler
at all. So the signal's number is written to a pipe, by Python's own handler in C, and a thread reads it there. The
ranks agree on the point in the exchange of flags after a step (``preemption.py``).
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SAME_S = 1.0
"""Signals so soon after another are the same Ctrl+C: torchrun sends it once more, and workers share the pipe."""
_PATIENCE_S = 10.0
"""How long the end of a batch is waited for, in addition to twice the longest time between two ends."""


class Interrupts:
    """The Ctrl+C of one run on one rank."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._poll = select.poll()
        self._poll.register(self._reads, select.POLLIN)
        self.asked_at: float | None = None
        """When Ctrl+C has reached this rank."""
        self._longest_s, self._since = 0.0, time.monotonic()
        self._presses = 0
        self._saves = False
        self.has_left = False
        """Whether the main thread has left the run, and ends by itself."""
        self.catches = False
        self.ends_now = False
        """Whether the signal's handler raises KeyboardInterrupt."""

    # The main thread

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Inside, SIGINT raises nothing by itself; unless others handle it, or this isn't the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != -1:  # of an event loop
            signal.set_wakeup_fd(before)
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        self.catches, self._since = True, time.monotonic()
        try:
            yield
        finally:
            self.catches = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(-1)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, no batch ends, however long it takes."""
        self._saves = True
        try:
            yield
        finally:
            self._saves = False

    def _handle(self, *_: object) -> None:
        if self.ends_now:
            self.ends_now = False
            raise KeyboardInterrupt

    def passes(self) -> None:
        """Tell that this rank is between two batches."""
        now = time.monotonic()
        self._longest_s, self._since = max(self._longest_s, now - self._since), now

    # The thread

    def wait(self, seconds: float) -> None:
        """Wait, at most until a signal comes, or :meth:`wake`."""
        if self._poll.poll(1000 * seconds):
            self._presses += os.read(self._reads, 4096).count(signal.SIGINT)

    def wake(self) -> None:
        with suppress(OSError):
            os.write(self._writes, b"\0")

    def close(self) -> None:
        os.close(self._reads)
        os.close(self._writes)

    def look(self) -> str | None:
        """Act on what came since; returns a reason to end at once, if there is one."""
        presses, self._presses = self._presses if self.catches else 0, 0
        now = time.monotonic()
        if self.asked_at is None:
            if presses:
                self.asked_at = now
            return None
        limit_s = _PATIENCE_S + 2 * self._longest_s
        if self.has_left:
            return None
        if presses and now - self.asked_at > _SAME_S:
            return "KeyboardInterrupt: Ctrl+C was pressed again, so all ranks end at once, and nothing is saved"
        if now - max(self.asked_at, self._since) > limit_s and not self._saves:
            return f"KeyboardInterrupt: no batch ended within {limit_s:.0f} s of Ctrl+C, so nothing is saved"
        return None
