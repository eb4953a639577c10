"""Threads that ask for a process's exit code at once all get it."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from typing import Any

from lightning_shard.testing.processes import _poll_one_at_a_time


def ends() -> None:
    pass


def test_threads_that_poll_at_once_read_one_exit_code() -> None:
    context: Any = multiprocessing.get_context("forkserver")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # unlocked, half of the processes seem to end with 255
    try:
        for _ in range(4):
            process = context.Process(target=ends)
            process.start()
            _poll_one_at_a_time(process)

            def poll(popen: Any = process._popen) -> None:
                while popen.poll() is None:
                    pass

            threads = [threading.Thread(target=poll) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert process.exitcode == 0
    finally:
        sys.setswitchinterval(before)
