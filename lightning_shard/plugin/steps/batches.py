"""Splits batches into microbatches, and has data ranks run equally many where they have to.

They have to where collective calls are made for each microbatch: by forwards (of parts that are gathered for each, of
experts, of statistics over data ranks), or by steps themselves, as by ``self.all_gather``. The latter is found in the
first batch of each kind of step. A step's code after the network runs on the last stage only, once for each microbatch,
so calls over all ranks (``torch.distributed.all_reduce(count)``) are refused: the other stages would never make them.

Data ranks' batches may differ in size: the last ones of a stream, those of a sampler that counts tokens, or of an
evaluation without padding. A number of microbatches that doesn't divide all of them isn't taken, so they have to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import compress
from threading import get_ident
from typing import Any

import torch.distributed as dist

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.torch_private import calls_replaced, is_in_backward

_OF_LAYOUTS = ("lightning_shard.", "torch.distributed.fsdp.", "torch.distributed.tensor.")
"""Modules whose calls aren't the step's."""


@dataclass(frozen=True)
class Step:
    """A step of the user's on one batch.

    Attributes:
        kind: A key of what it may depend on, other than its batch.
        args: What it is given after the batch.
    """

    method: str
    kind: str
    call: Callable[..., Any]
    parts: Sequence[Any]
    seeds: Sequence[int]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batches:
    """Splits the batches of one loop.

    Args:
        of_all: For each flag, whether it is true on all data ranks; a collective call of these.
    """

    def __init__(self, loop: Loop, microbatches: int, of_all: Callable[[Sequence[bool]], list[bool]]) -> None:
        self._loop = loop
        self._microbatches = microbatches
        self._of_all = of_all
        self._whole: int | None = None

    def split(self, batch: Any) -> list[Any]:
        """Split a training batch; one of another size than the first may have fewer microbatches, if it doesn't divide.

        A collective call over the data ranks.

        Raises:
            BatchError: The first batch doesn't divide into the microbatches.
        """
        if self._microbatches == 1:
            return [batch]
        size = tree.batch_size(batch)
        is_first = self._whole is None
        self._whole = self._whole or size
        self._loop.refuse_list_of_samples(batch, may_be_last=size < self._whole)
        if is_first and size % self._microbatches:
            return tree.split(batch, self._microbatches)  # raises
        return tree.split(batch, self._most_parts(size, self._of_all))

    def split_evaluated(self, batch: Any, *, alike: bool) -> list[Any]:
        """Split an evaluation's batch, into fewer microbatches if it doesn't divide.

        Args:
            alike: Whether into as many as on other data ranks; then it is a collective call of these.
        """
        if self._microbatches > 1:
            self._loop.refuse_list_of_samples(batch, may_be_last=True)
            size, of_all = tree.batch_size(batch), self._of_all if alike else list
            return tree.split(batch, self._most_parts(size, of_all))
        return [batch]

    def _most_parts(self, size: int, of_all: Callable[[Sequence[bool]], list[bool]]) -> int:
        numbers = range(1, self._microbatches + 1)
        return max(compress(numbers, of_all([size % number == 0 for number in numbers])))


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
        """Look at the pipelined step that runs inside; calls over the world that it makes are refused."""
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


class Alike:
    """The data ranks that hold the same part of one model.

    Args:
        forwards_call: Whether forwards make collective calls over them.
        rehearses: Whether steps may run again at all.
    """

    def __init__(
        self, groups: Groups, own_calls: OwnCalls, data_ranks: int, *, forwards_call: bool, rehearses: bool
    ) -> None:
        self._groups = groups
        self._own_calls = own_calls
        self._has_peers = data_ranks > 1
        self._forwards_call = self.is_needed = forwards_call and self._has_peers
        """The latter: whether all have to run equally often, as far as known."""
        self._rehearses = rehearses
        self._begun: set[str] = set()

    def knows(self, kind: str) -> bool:
        """Whether a step of this kind has run."""
        return kind in self._begun

    def of_any(self, condition: bool) -> bool:
        """Whether a condition holds on any that has to run alike; a collective call of these, if it is needed."""
        return self._groups.of_any_peer(condition) if self.is_needed else condition

    def begin(self, kind: str) -> None:
        """After the first batch of a kind of step: agree whether all have to run alike from now on.

        A collective call over the data ranks and over the pipeline.
        """
        if kind not in self._begun:
            self._begun.add(kind)
            if self._has_peers:
                made = self._groups.of_any_peer(self._own_calls.made)
                self.is_needed |= any(self._groups.gather_over_stages(made))

    def may_rehearse(self, method: str) -> bool:
        """Whether a step may run again after the first batch of its kind.

        Evaluations whose steps themselves call other data ranks may not: each may see a loader's first batch at another
        time.
        """
        return self._rehearses and (method == "training_step" or self._forwards_call or not self.is_needed)

    def all_can(self, method: str, can: bool) -> bool:
        """Whether a run is possible on all ranks that have to run alike; a collective call of these.

        In training all have to, since parameters are gathered for it.
        """
        return not (self._groups.of_any_peer(not can) if method == "training_step" else self.of_any(not can))
