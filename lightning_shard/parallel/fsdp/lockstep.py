"""Let data ranks call FSDP2 units different numbers of times in an evaluation step, as when they generate text.

Each call of a unit all-gathers its parameters from all data ranks, so a rank that calls it once more than the others
would wait for them forever. Therefore, in an evaluation step, a rank announces each repeated call of a unit by a small
all-reduce before it. A rank whose step is over takes part in the announced all-gathers until the step is over on all
ranks.

A step that calls each unit once costs one small all-reduce, at its end. Only repeated calls are announced: a unit that
one rank calls and another doesn't call at all in a step still waits, until the process group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.shard import join_all_gather

_OVER = -1


class Lockstep:
    """Makes all ranks take part in each all-gather of an evaluation step.

    Args:
        units: All units, in the same order on all ranks.
        group: A CPU group of all ranks.
        deals_experts: Whether there is expert parallelism: calls send tokens to other ranks' experts, and a rank whose
            step is over can't take part in these exchanges, so unequal numbers of calls are refused.
    """

    def __init__(self, units: Sequence[FSDPModule], group: dist.ProcessGroup, *, deals_experts: bool = False) -> None:
        self._units = units
        self._group = group
        self._deals_experts = deals_experts
        self._called: set[int] = set()
        self._in_step = self._calls_again = False
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before_call, index), prepend=True)  # type: ignore[attr-defined]

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of an evaluation step. Collective over all ranks.

        Raises:
            StepError: Data ranks call different units at once; or, with expert parallelism, call units unequally often.
        """
        self._called.clear()
        self._in_step, self._calls_again = True, False
        try:
            yield
        finally:
            self._in_step = False
        while (index := self._next_call(_OVER)) != _OVER:
            if self._deals_experts:
                raise StepError(
                    "Data ranks call the network different numbers of times in an evaluation step, and its experts are"
                    " dealt to all of them: call it equally often on all (generate as many tokens), or use"
                    " expert_parallel_size=1."
                )
            join_all_gather(self._units[index])

    def _before_call(self, index: int, *_: Any) -> None:
        if not self._in_step:
            return
        self._calls_again = self._calls_again or index in self._called
        self._called.add(index)
        if self._calls_again:
            self._next_call(index)

    def _next_call(self, index: int) -> int:
        """The index of the unit that ranks call next; :data:`_OVER` if the step is over on all of them.

        Raises:
            StepError: On all ranks, if two ranks call different units.
        """
        is_calling = index != _OVER
        least_and_most = torch.tensor([-index if is_calling else -len(self._units), index])
        dist.all_reduce(least_and_most, op=dist.ReduceOp.MAX, group=self._group)
        least, most = -int(least_and_most[0]), int(least_and_most[1])
        if most not in (_OVER, least):
            raise StepError(
                "Data ranks call different parts of the network at once, in an evaluation step that calls parts several"
                " times, and each part is gathered from all of them: the parts must run in one order on all ranks, only"
                " how often may differ."
            )
        return most
