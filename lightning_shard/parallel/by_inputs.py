"""Gradients by inputs within a step, as of a penalty on slopes, under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.parallel.data import expect_backward, has_unreduced_gradients
from lightning_shard.parallel.units import groups_under


class ByInputs:
    """``torch.autograd.grad`` within steps, which leaves parameters gathered: a graph that it makes uses them again.

    The backward of such a graph may run it after all else: a thread of autograd's numbers what it records by itself. So
    gradients of a unit's parameters come when FSDP2 takes its backward for done, and would be lost. Therefore nothing
    is reduced or freed before all of that backward is over.

    Args:
        root: The model.
        reduces: Whether the next backward of a step is to reduce gradients.
    """

    def __init__(self, root: nn.Module, reduces: Callable[[], bool]) -> None:
        self._root, self._reduces = root, reduces
        self._holds = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A step runs inside."""
        plain = torch.autograd.grad

        def grad(*args: Any, **kwargs: Any) -> Any:
            expect_backward(self._root, reduces=False, reshards=False)
            made: list[Tensor] = []
            try:
                found = plain(*args, **kwargs)
                made = [each for each in found if each is not None and each.requires_grad]
                return found
            finally:
                self._hold_until_backward_of(made)

        torch.autograd.grad = grad
        try:
            yield
        finally:
            torch.autograd.grad = plain

    def _hold_until_backward_of(self, made: list[Tensor]) -> None:
        for each in made:
            each.register_hook(self._begins)
        self._holds = self._holds or bool(made)
        if not self._holds:
            expect_backward(self._root, reduces=self._reduces())

    def _begins(self, _: Tensor) -> None:
        # private, and what FSDP2 and DDP do (torch 2.11 to 2.13): it is called when all of the backward is over
        torch.autograd.Variable._execution_engine.queue_callback(self.end)  # type: ignore[attr-defined]

    def end(self) -> None:
        """Reduce and free what was held; after any backward, since a loss need not be of what was differentiated."""
        if not self._holds:
            return
        self._holds = False
        expect_backward(self._root, reduces=self._reduces())
        for group in groups_under(self._root):
            if group.is_unsharded or has_unreduced_gradients(group):
                group.post_backward()
                group.finalize_backward()
