"""Let data ranks call FSDP2 units unequally in an evaluation step, as when they generate text or skip blocks.

Each call of a sharded unit all-gathers its parameters from all data ranks, so a rank that calls one more than the
others would wait for them forever. Therefore all ranks make the same all-gathers in the same order, in each step:

1. Those of the *expected* units: the ones that an earlier step gathered, each once, in its order. A rank that skips one
   takes part in its all-gather all the same. No message is needed.
2. All others are announced by a small all-reduce before each. Of the units that ranks call next, the first in the
   model's order is gathered; ranks that call another one, or whose step is over, take part, and announce theirs again.

A step that calls each unit once costs one small all-reduce, at its end; the first step, and one after the calls have
changed, costs one for each call more. With expert parallelism every call is announced: calls send tokens to other
ranks' experts, in which a rank that makes no such call can't take part, so unequal calls are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.shard import is_gathered, join_all_gather


class Lockstep:
    """Makes all ranks take part in each all-gather of an evaluation step.

    Args:
        units: All units, in the same order on all ranks.
        group: A CPU group of all ranks.
        deals_experts: Whether there is expert parallelism.
    """

    def __init__(self, units: Sequence[nn.Module], group: dist.ProcessGroup, *, deals_experts: bool = False) -> None:
        self._units = units
        self._over = len(units)  # announced in place of a unit's index
        self._group = group
        self._deals_experts = deals_experts
        self._expected: list[int] | None = None  # equal on all ranks; None: to be found by the next step
        self._still_expected: list[int] = []
        self._called: set[int] = set()
        self._announced: list[int] = []  # equal on all ranks
        self._in_step = self._announces = False
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before_call, index), prepend=True)  # type: ignore[attr-defined]

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of an evaluation step. Collective over all ranks.

        Raises:
            StepError: On all ranks: with expert parallelism, they call different units.
        """
        expected, self._expected = self._expected, None
        self._announces = expected is None
        self._still_expected = list(expected or ())
        self._called.clear()
        self._announced.clear()
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        self._gather_expected()
        all_skip_some = self._announce(self._over, skips=not self._called.issuperset(expected or ()))
        if not self._deals_experts:
            if expected is None:
                self._expected = list(dict.fromkeys(self._announced))
            elif not all_skip_some and set(self._announced).issubset(expected):
                self._expected = expected

    def _before_call(self, index: int, *_: Any) -> None:
        if not self._in_step:
            return
        self._called.add(index)
        if is_gathered(self._units[index]) and not self._deals_experts:
            return  # on the other ranks too, since all of them have made the same all-gathers
        if not self._announces:
            if index in self._still_expected:
                self._gather_expected(before=index)
                return
            self._gather_expected()
            self._announces = True
        self._announce(index)

    def _gather_expected(self, before: int | None = None) -> None:
        """Take part in the all-gathers of expected units that this rank doesn't call."""
        while self._still_expected:
            index = self._still_expected.pop(0)
            if index == before:
                return
            join_all_gather(self._units[index])

    def _announce(self, index: int, *, skips: bool = False) -> bool:
        """Return when all ranks are about to gather this unit, or to end the step; gathers earlier ones along.

        Returns:
            Whether all ranks have passed ``skips``.

        Raises:
            StepError: On all ranks: with expert parallelism, they call different units.
        """
        while True:
            announced = torch.tensor([index, -index, skips])
            dist.all_reduce(announced, op=dist.ReduceOp.MIN, group=self._group)
            first, last, all_skip = int(announced[0]), -int(announced[1]), bool(announced[2])
            if first != last and self._deals_experts:
                raise StepError(
                    "Data ranks call different parts of the network, or call it different numbers of times, in an"
                    " evaluation step, and its experts are dealt to all of them: make equal calls on all (generate as"
                    " many tokens), or use expert_parallel_size=1."
                )
            if first != self._over:
                self._announced.append(first)
            if first == index:
                return all_skip
            join_all_gather(self._units[first])
