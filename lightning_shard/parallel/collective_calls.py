"""The collective calls of ``torch.distributed``, as users' code makes them: replaced by other functions for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
    *("all_gather_single", "reduce_scatter_single"),  # torch 2.13
)


@contextmanager
def calls_replaced(by: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Context in which other functions replace the collective calls of ``torch.distributed``.

    Args:
        by: Makes such a function of a call's name and the call.
    """
    own = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}
    for name, call in own.items():
        setattr(dist, name, by(name, call))
    try:
        yield
    finally:
        for name, call in own.items():
            setattr(dist, name, call)
