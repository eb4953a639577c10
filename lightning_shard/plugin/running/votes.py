"""Lets ranks agree through the process group's store, where some of them may not join a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

_POLL_S = 0.05


def collect(
    store: dist.Store, keys: Sequence[str], within_s: float, settles: Callable[[str], bool] = lambda _: False
) -> dict[str, str]:
    """Read these keys' values, as far as they are set in time; returns early once a value settles the matter."""
    found: dict[str, str] = {}
    stop = time.monotonic() + within_s
    while True:
        for key in keys:
            if key not in found and store.check([key]):
                found[key] = store.get(key).decode()
                if settles(found[key]):
                    return found
        if len(found) == len(keys) or time.monotonic() > stop:
            return found
        time.sleep(_POLL_S)
