"""Gradients with respect to inputs within a step under FSDP2, such as for a gradient penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.shard import expect_backward_of, has_unreduced_gradients, is_gathered
from lightning_shard.parallel.fsdp.units import call_fsdp, groups_of, sharded_units
from lightning_shard.torch_private import backwards_replaced


class InputGradients:
    """Makes backwards with respect to inputs correct within steps, and the later backwards through their graphs.

    A graph created by ``torch.autograd.grad(…, create_graph=True)`` uses parameters again in its own backward. FSDP2
    all-gathers a unit when the gradient of its output arrives; in that backward this may be after its weights are used,
    or never. Nor does the end of a unit's backward mean that all gradients of its parameters have arrived: each
    autograd thread numbers the nodes that it records by itself, so nodes recorded in a backward may run last. So from
    the first such graph of a step on, all units that such graphs use are unsharded before each backward, and nothing is
    reduced or freed before that whole backward is over.

    Args:
        root: The model, with its units.
        reduces: Returns whether the next backward of a step is to reduce gradients.
        frees: Reshard at once what was unsharded for gradients with respect to inputs. Needed if an optimizer may step
            within the step: unsharded parameters would keep the weights of before.
    """

    def __init__(self, root: nn.Module, reduces: Callable[[], bool], *, frees: bool) -> None:
        self._reduces, self._frees = reduces, frees
        self._units = list(sharded_units(root))
        self._used: list[nn.Module] = []
        self._runs = False

    def watched(self) -> AbstractContextManager[None]:
        """The context of a step: backwards inside are intercepted."""
        self._used = []
        return backwards_replaced(lambda plain: partial(self._run, plain)) if self._units else nullcontext()

    def _run(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of torch's function, called with (outputs, gradients, retain_graph, create_graph, inputs, …)."""
        differentiate, creates, inputs = partial(plain, *args, **kwargs), args[3], args[4]
        if self._runs:  # a nested backward, as of a reentrant checkpoint
            return differentiate()
        self._runs = True
        try:
            if not inputs:
                return self._of_parameters(differentiate, creates)
            self._refuse_parameters(inputs)
            return self._by_inputs(differentiate, creates)
        finally:
            self._runs = False

    def begin(self) -> None:
        """Before a backward: unshard the units that created graphs use, and delay reductions."""
        if self._used:
            expect_backward_of(self._units, reduces=False, reshards=False)
            _gather(self._used)

    def end(self) -> None:
        """After any backward, also one that used no created graph: reduce the delayed gradients, and reshard."""
        if not self._used:
            return
        expect_backward_of(self._units, reduces=self._reduces())
        for unit in self._units:
            for group in groups_of(unit):
                if group.is_unsharded or has_unreduced_gradients(group):
                    group.post_backward()
                    group.finalize_backward()

    def _of_parameters(self, differentiate: Callable[[], Any], creates: bool) -> Any:
        if creates:
            raise StepError(
                "A step calls backward(create_graph=True), whose graph would be of gathered parameters and of gradients"
                " that aren't reduced over the ranks: take the gradients that are wanted by"
                " torch.autograd.grad(…, create_graph=True), or name them by backward(inputs=[…], create_graph=True).",
                breaks=4,
            )
        self.begin()
        try:
            return differentiate()
        finally:
            self.end()

    def _refuse_parameters(self, inputs: Iterable[Any]) -> None:
        """Refuse sharded parameters as inputs: no graph contains them, so a backward would silently ignore them."""
        groups = (group for unit in self._units for group in groups_of(unit))
        sharded = {id(each.sharded_param) for group in groups for each in group.fsdp_params}
        if any(id(each) in sharded for each in inputs):
            raise StepError(
                "A step takes gradients by parameters (inputs of torch.autograd.grad or backward) that are sharded over"
                " data ranks, so no graph is of them, and there are none: leave inputs out and freeze the others by"
                " toggle_optimizer or requires_grad_(False), or use data_parallel_size=1.",
                breaks=4,
            )

    def _by_inputs(self, differentiate: Callable[[], Any], creates: bool) -> Any:
        before = [unit for unit in self._units if is_gathered(unit)]
        expect_backward_of(self._units, reduces=False, reshards=False)
        _gather(self._used)
        try:
            return differentiate()
        finally:
            expect_backward_of(self._units, reduces=self._reduces())
            if creates:
                self._used = [unit for unit in self._units if unit in self._used or is_gathered(unit)]
            for unit in self._units if self._frees else ():
                if unit not in before:
                    call_fsdp(unit, FSDPModule.reshard)


def _gather(units: Iterable[nn.Module]) -> None:
    for unit in units:
        if not is_gathered(unit):
            call_fsdp(unit, FSDPModule.unshard)
