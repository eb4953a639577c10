"""The process of one rank: runs a job, reports its result or error, and ends when its parent process ends."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
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
    """The job of one rank."""

    call: bytes
    """The pickled ``(function, args, kwargs)``."""
    options: Options
    environment: dict[str, str]
    stacks: Path
    under_pytest: bool
    parent_start_method: str | None


def serve(job: Job, pipe: connection.Connection) -> None:
    gc.freeze()  # objects from before the fork stay: don't walk them in collections, which would copy their pages
    with open(job.stacks, "w") as file:
        with contextlib.suppress(OSError):
            os.setpgrp()
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
        os.environ.clear()
        os.environ.update(job.environment)
        # this process's children (a DataLoader's workers) use the parent's start method
        multiprocessing.set_start_method(job.parent_start_method, force=True)
        if job.under_pytest:
            importlib.import_module("lightning_shard.testing.assertions")
        try:
            with _process_group(job.options):
                function, args, kwargs = pickle.loads(job.call)
                result = pickle.dumps(function(*args, **kwargs))
                pipe.send_bytes(pickle.dumps(("result", result, b"")))
                # wait: destroying the group while another rank still communicates would fail that rank
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

    from lightning_shard.torch_private import one_worker

    torch.set_num_threads(1)  # so that ranks and one process round alike, whatever the machine
    _seed()
    if options.init:
        with one_worker():
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
    """The pickled error; empty if it can't be pickled (its text is sent in any case)."""
    with contextlib.suppress(Exception):
        return pickle.dumps(error)
    return b""


def _wait_to_be_killed(pipe: connection.Connection) -> NoReturn:
    """Keep a failed rank's sockets open until all ranks have reported, so that its exit doesn't fail the others."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)
