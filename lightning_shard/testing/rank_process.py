"""A rank's process: it does what it is told, tells how that went, and lives no longer than the process that asks."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Literal, NoReturn


@dataclass(frozen=True)
class Options:
    world_size: int
    timeout_s: float = 60
    backend: str = "gloo"
    init: bool = True
    elastic: bool = False
    start_method: Literal["forkserver", "spawn"] = "forkserver"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size ({self.world_size}) must be at least 1.")
        if self.init and self.elastic:
            object.__setattr__(self, "init", False)


@dataclass(frozen=True)
class Job:
    """What one rank is told."""

    call: bytes
    """The pickled ``(function, args, kwargs)``."""
    options: Options
    environment: dict[str, str]
    stacks: Path
    under_pytest: bool
    parent_start_method: str | None


def serve(job: Job, pipe: connection.Connection) -> None:
    gc.freeze()  # what was imported before the fork lives on: collections needn't walk it, nor copy its pages
    with open(job.stacks, "w") as file:
        with contextlib.suppress(OSError):
            os.setpgrp()
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
        os.environ.clear()
        os.environ.update(job.environment)
        # this process's own children (a DataLoader's workers) start as the asking process's would
        multiprocessing.set_start_method(job.parent_start_method, force=True)
        if job.under_pytest:
            _rewrite_assertions()
        try:
            with _process_group(job.options):
                function, args, kwargs = pickle.loads(job.call)
                result = pickle.dumps(function(*args, **kwargs))
                pipe.send_bytes(pickle.dumps(("result", result, b"")))
                # a group torn down while another rank still talks would fail that one
                pipe.recv_bytes()
        except BaseException as error:
            kind, payload = _account(error)
            pipe.send_bytes(pickle.dumps((kind, payload, _pickled(error))))
            if kind == "error":
                _wait_to_be_killed(pipe)
            with contextlib.suppress(EOFError, OSError):
                pipe.recv_bytes()


@contextlib.contextmanager
def _process_group(options: Options) -> Iterator[None]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    _seed()
    if options.init:
        distributed.init_process_group(options.backend, timeout=timedelta(seconds=options.timeout_s))
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _seed() -> None:
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _account(error: BaseException) -> tuple[str, str]:
    pytest = sys.modules.get("pytest")
    if pytest is not None and isinstance(error, pytest.skip.Exception):
        return "skip", str(error)
    return "error", "".join(traceback.format_exception(error))


def _pickled(error: BaseException) -> bytes:
    """Nothing where it doesn't pickle: its text is there in any case."""
    with contextlib.suppress(Exception):
        return pickle.dumps(error)
    return b""


def _wait_to_be_killed(pipe: connection.Connection) -> NoReturn:
    """A failed rank holds its sockets open until all accounts are in: the others must not fail for its exit."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _rewrite_assertions() -> None:
    """Have `assert a == b` in test modules say what a and b were, as pytest does.

    Private names of pytest 8 and 9: the hook is otherwise installed only by a whole pytest run.
    """
    with contextlib.suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        config = get_config([])
        hook = install_importhook(config)
        hook.fnpats = ["test_*.py", "*_test.py"]
        atexit.register(sys.meta_path.remove, hook)
