"""Refuses collective calls over all ranks in a pipelined step, such as ``torch.distributed.all_reduce(count)``.

With several pipeline stages a step's code after the network runs on the last stage only, once for each microbatch. The
other stages would never make the call, and the last stage would wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist

from lightning_shard.errors import StepError

_CALLS = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
_KNOWN = ("lightning", "lightning_shard", "torch", "torchmetrics")
"""Packages whose own calls pass their group."""


@contextmanager
def refusing_world_calls() -> Iterator[None]:
    """Check the collective calls of the pipelined step that runs inside.

    Raises:
        StepError: The user's code makes one over the world.
    """
    own = {name: getattr(dist, name) for name in _CALLS}
    for name, call in own.items():
        setattr(dist, name, _refusing(name, call))
    try:
        yield
    finally:
        for name, call in own.items():
            setattr(dist, name, call)


def _refusing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def checked(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        group = kwargs.get("group", next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
        if caller not in _KNOWN and group in (None, dist.group.WORLD):
            raise StepError(
                f"The step calls torch.distributed.{name} over all ranks, and with several pipeline stages only the"
                " last one comes to the code after the network, once for each microbatch: use self.all_gather,"
                " self.log(…, sync_dist=True) or a torchmetrics metric, which act on the data ranks, or"
                " pipeline_parallel_size=1."
            )
        return call(*args, **kwargs)

    return checked
