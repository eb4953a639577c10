"""Detects optimizers whose update of a parameter takes more than this rank's parameters: others, or other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lightning_shard.plugin.optimizers.trials import Make, is_of_torch, kinds_of_groups, stepped, tried
from lightning_shard.torch_private import calls_replaced

_SCALES = (1.0, 1000.0)
_OF_RANKS = "torch.distributed.optim."
"""Whose ``ZeroRedundancyOptimizer`` can't be tried, since it holds all parameters in attributes, too."""


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's updates depend on other parameters, tested on two small ones.

    torch's own optimizers don't. Where nothing is known (``trials.tried``) the answer is ``False``.
    """
    if is_of_torch(optimizer):
        return False

    def differs(make: Make) -> bool:
        beside_another, alone = (stepped(make, scales) for scales in (_SCALES, _SCALES[:1]))
        return not torch.allclose(beside_another, alone, rtol=1e-4, atol=1e-7, equal_nan=True)

    return any(tried(optimizer, group, differs) for group, *_ in kinds_of_groups(optimizer))


def collective_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The first collective that its step calls, if it calls one: as where ranks take turns in computing updates."""
    if is_of_torch(optimizer):
        return None
    if type(optimizer).__module__.startswith(_OF_RANKS):
        return "broadcast"
    called: list[str] = []

    def ends_trial(name: str, _: Callable[..., Any]) -> Callable[..., NoReturn]:
        def end(*_: Any, **__: Any) -> NoReturn:
            called.append(name)
            raise _Called

        return end

    with calls_replaced(by=ends_trial):
        for group, *_ in kinds_of_groups(optimizer):
            tried(optimizer, group, stepped)
    return called[0] if called else None


class _Called(Exception):
    """Ends a trial before a collective: ranks need not make it together."""
