"""Contexts in which unknown values are computed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Now(threading.local):
    depth: int = 0


_now = _Now()


@contextmanager
def computing_unknown() -> Iterator[None]:
    """Context in which kernels may read unknown values: what they give is marked."""
    _now.depth += 1
    try:
        yield
    finally:
        _now.depth -= 1


@contextmanager
def without_graph() -> Iterator[None]:
    """Context in which unknown values are computed; no graph refers to them, so values can be put in their place."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else weights that are cast here would get no gradient later
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad(), computing_unknown():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)


def is_computing_unknown() -> bool:
    return _now.depth > 0
