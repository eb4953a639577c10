"""Groups over gloo that have one worker thread each, so that two workers of torch can't corrupt memory.

A gloo group of torch has two workers. A worker that has completed a collective writes the collective's name to a string
of the group, and holds no lock. If both do so at once, and a name is too long to be kept within the string (that of the
all-gathers of DTensor), its memory is freed twice, or at a wrong address: the rank dies of SIGSEGV or SIGABRT ("free():
invalid pointer"), about once in a million collectives on a busy machine. One worker can't meet another. It runs a
group's collectives in the order in which they are called, which is the same on all ranks anyway.

Private: ``ProcessGroupGloo`` in ``torch.distributed.distributed_c10d``, by which torch creates groups without a way to
pass options, and gloo's ``_Options``; ``ProcessGroupGloo::runLoop`` writes ``lastCompletedWorkName`` in torch 2.11 to
2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_shard.torch_private import gloo_groups_replaced

_INTERFACES = "GLOO_SOCKET_IFNAME"
"""The variable that names gloo's network interfaces, separated by commas; torch reads it where it makes options."""


@contextmanager
def one_worker() -> Iterator[None]:
    """Groups over gloo that are created inside have one worker."""
    if not dist.is_gloo_available():
        yield
        return
    original = distributed_c10d.ProcessGroupGloo

    class OneWorker(original):  # type: ignore[misc, valid-type]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **settings: bool) -> None:
            options = original._Options()  # type: ignore[attr-defined]
            options._threads = 1
            options._timeout = timeout
            for name, value in settings.items():  # enable_reconfigure, since torch 2.14
                setattr(options, name, value)
            names = os.environ.get(_INTERFACES)
            options._devices = (
                [original.create_device(interface=name) for name in names.split(",")]
                if names
                else [original.create_default_device()]
            )
            super().__init__(store, rank, size, options)

    with gloo_groups_replaced(OneWorker):
        yield
