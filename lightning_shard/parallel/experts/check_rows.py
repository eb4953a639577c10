"""Check that an expert computes each row by itself, since ranks give it other rows, and more, than one process would.

A capacity per expert, or statistics over its rows, would silently compute something else. So with its first rows an
expert runs on a few of them alone, on one of them, and on all of these many times over: each row's results must be
equal within rounding. Not seen: what depends on the number of rows only beyond :data:`ROWS` × :data:`TIMES`.

Private: ``torch.utils._python_dispatch._disable_current_modes`` (torch 2.11 to 2.14). Selective checkpointing counts
operations, and this check runs in a first forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_shard.errors import PlanError
from lightning_shard.parallel.context.check_positions import random_state

ROWS = 64
TIMES = 8
_APART, _APART_IN_16_BITS = 1e-2, 1e-1
"""Tolerances relative to the largest element: matrix products of other sizes are rounded differently."""


class RowCheck:
    """Checks one module of experts, once.

    Args:
        name: The module's name, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_done = False

    @torch.compiler.disable
    def __call__(self, compute: Callable[..., Tensor], module: nn.Module, *given: Tensor) -> None:
        """Run an expert on parts of what it is given; changes no state, unless the expert's code does.

        Args:
            compute: Runs one expert on tensors like ``given``.
            module: The expert, or the module that holds it.
            given: What it is given, ``[rows, …]`` each.

        Raises:
            PlanError: On this rank. A row's result depends on other rows.
        """
        if self._is_done or any(type(each) is not Tensor or each.is_meta or not len(each) for each in given):
            return
        with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction(), _evaluating(module):
            few = [each[:: -(-len(each) // ROWS)] for each in given]
            before = random_state(few[0].device)
            alone = compute(*few)
            if random_state(few[0].device) != before:  # what it computes can't be compared
                self._is_done = True
                return
            largest = alone.abs().max()
            if not largest.isfinite() or not largest:  # not yet: weights that are zero at first hide everything
                return
            many = compute(*(torch.cat([each] * TIMES) for each in few)).unflatten(0, (TIMES, -1))
            one = compute(*(each[:1] for each in few))
            is_exact = alone.dtype.itemsize > 2 and not torch.is_autocast_enabled(alone.device.type)
            apart = torch.stack([(many - alone).abs().max(), (one - alone[:1]).abs().max()]).max()
            self._is_done = True
            if not apart <= (_APART if is_exact else _APART_IN_16_BITS) * largest:
                raise PlanError(
                    f"An expert of {self._name} computes something else for a row among others than for the row alone,"
                    " as with a capacity, or with statistics over rows. Where experts are dealt to ranks each is given"
                    " the rows of several ranks at once, so training would differ from one process's: have each row's"
                    " result depend on this row only, or use expert_parallel_size=1."
                )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, dropout is off."""
    training = [(part, part.training) for part in module.modules()]
    for part, _ in training:
        part.training = False
    try:
        yield
    finally:
        for part, was in training:
            part.training = was
