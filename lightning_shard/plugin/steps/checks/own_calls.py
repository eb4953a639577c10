"""Looks at the collective calls that a pipelined step makes itself.

With several pipeline stages a step's code after the network runs on the last stage only, once for each microbatch. So
calls over all ranks (``torch.distributed.all_reduce(count)``) are refused: the other stages would never make them, and
the last stage would wait. Calls over the data ranks are noted: these have to run a microbatch equally often then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from threading import get_ident
from typing import Any

import torch.distributed as dist

from lightning_shard.errors import StepError
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.torch_private import calls_replaced, is_in_backward

_OF_LAYOUTS = ("lightning_shard.", "torch.distributed.fsdp.", "torch.distributed.tensor.")
"""Modules whose calls aren't the step's."""


class OwnCalls:
    """The collective calls of one module's steps, other than those of FSDP2, of plans and of this package.

    Args:
        stages: This rank's; nothing is looked at without.

    Attributes:
        made: Whether a step has made one, as by ``self.all_gather``.
    """

    def __init__(self, stages: Stages | None) -> None:
        self._stages = stages
        self._thread: int | None = None  # while it looks
        self.made = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the pipelined step that runs inside.

        Raises:
            StepError: The user's code, or a library that it calls, makes a call over the world.
        """
        with calls_replaced(self._checking, _OF_LAYOUTS) if self._stages is not None else nullcontext():
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = None

    def _checking(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # a module that was imported in a step may keep this; another thread may be an asynchronous save's
            if self._thread is None or (get_ident() != self._thread and not is_in_backward()):
                return call(*args, **kwargs)
            self.made |= self._stages is not None and self._stages.in_step  # what was logged is reduced after it
            group = kwargs.get("group", next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None))
            if group in (None, dist.group.WORLD):
                raise StepError(
                    f"The step calls torch.distributed.{name} over all ranks, and with several pipeline stages only the"
                    " last one comes to the code after the network, once for each microbatch: use self.all_gather,"
                    " self.log(…, sync_dist=True) or a torchmetrics metric, which act on the data ranks, or"
                    " pipeline_parallel_size=1.",
                    breaks=1,
                )
            return call(*args, **kwargs)

        return checked
