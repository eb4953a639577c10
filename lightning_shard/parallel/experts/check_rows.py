"""Check that an expert computes each row by itself, since ranks give it other rows, and more, than one process would.

A capacity per expert, or statistics over its rows, would silently compute something else. So with its first rows an
expert runs on a few of them alone, on one of them, and on all of these many times over: each row's results must be
equal within rounding. Not seen: what depends on the number of rows only beyond :data:`ROWS` × :data:`TIMES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_shard.errors import PlanError
from lightning_shard.parallel.block_probe import Result, first_apart, in_32_bits, random_state, unseen

ROWS = 64
TIMES = 8
_APART = {True: 1e-2, False: 1e-1}
"""Tolerance in 32 bits, and in fewer, relative to the norm: matrix products of other sizes are rounded differently."""


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
        with torch.no_grad(), unseen(), torch._C.DisableTorchFunction(), _evaluating(module):
            few = [each[:: -(-len(each) // ROWS)] for each in given]
            before = random_state(few[0].device)
            alone = compute(*few)
            if random_state(few[0].device) != before:  # what it computes can't be compared
                self._is_done = True
                return
            largest = alone.abs().max()
            if not largest.isfinite() or not largest:  # not yet: weights that are zero at first hide everything
                return
            many = compute(*(torch.cat([each] * TIMES) for each in few))
            one = compute(*(each[:1] for each in few))
            self._is_done = True
            pairs = [(many, torch.cat([alone] * TIMES)), (one, alone[:1])]
            if first_apart(((Result("", a), Result("", b)) for a, b in pairs), _APART[in_32_bits([alone])]) is not None:
                raise PlanError(
                    f"An expert of {self._name} computes something else for a row among others than for the row alone,"
                    " as with a capacity, or with statistics over rows. Where experts are dealt to ranks each is given"
                    " the rows of several ranks at once, so training would differ from one process's: have each row's"
                    " result depend on this row only, or use expert_parallel_size=1."
                )


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, dropout is off."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
