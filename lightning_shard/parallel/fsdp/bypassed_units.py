"""All-gather units whose backward begins elsewhere than at their output, also for gradients with respect to inputs.

FSDP2 frees a unit's parameters after its forward, and all-gathers them when the gradient of its output arrives. A
gradient may enter a unit by another way: by a value that it keeps as an attribute, puts into a cache, or that a hook on
a submodule collects. If the output has no gradient, or a later one, the unit would compute with freed memory.

So the graph of the loss is searched for such ways: in an epoch's first, second, fourth, … step, and whenever it has
another number of nodes than before. From then on each backward begins by all-gathering the units that were found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.arguments import Node, UnitCall, recorded
from lightning_shard.parallel.fsdp.shard import expect_backward_of, has_unreduced_gradients, is_gathered
from lightning_shard.parallel.fsdp.units import (
    call_fsdp,
    frees,
    gather_for_backward,
    gathered_in,
    groups_of,
    sharded_units,
)
from lightning_shard.torch_private import backwards_replaced


class BypassedUnits:
    """Finds and gathers the units of one model.

    Args:
        root: The model, sharded.
        group: The data ranks, which agree on the units. ``None`` if their graphs are alike anyway: on pipeline stages,
            where ranks search different numbers of times for what crosses.
        device: Where tensors of that group's collectives are.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._units = [unit for unit in sharded_units(root) if unit is not root and frees(unit)]
        self._group = group
        self._device = device
        self._names = {module: name for name, module in root.named_modules()}
        self._forwards: dict[int, tuple[int, list[UnitCall]]] = {}
        """By stage, of the forward that was watched: the number of a node before it, and the calls of units so far."""
        self._numbers: dict[int, set[int]] = defaultdict(set)
        self._found: dict[int, set[int]] = defaultdict(set)
        self._in_forward = False
        self._steps = 0
        self._epoch = -1

    def begin_step(self, epoch: int) -> None:
        """A training step begins."""
        if epoch != self._epoch:
            self._epoch, self._steps = epoch, 0
        self._steps += 1
        self._forwards.clear()

    @contextmanager
    def watched(self, stage: int = 0, *, ends: bool = False) -> Iterator[None]:
        """Context of a forward in a training step, whose graph is searched in :meth:`gather`.

        Args:
            stage: The pipeline stage.
            ends: Whether all backwards are run inside.
        """
        if not self._units:
            yield
            return
        calls: list[UnitCall] = []
        self._forwards[stage] = _next_number(), calls
        with recorded(calls):
            self._in_forward = True
            try:
                yield
            finally:
                self._in_forward = False
                if ends:
                    del self._forwards[stage]

    def gather(self, outputs: Any, stage: int = 0) -> None:
        """Have the backward of outputs, such as a loss, begin by all-gathering the units that it bypasses.

        A collective call over the data ranks in an epoch's first, second, fourth, … step, if there is a group. Inside
        :meth:`watched` (manual optimization) it may be called for several losses; otherwise for the forward before.

        Raises:
            StepError: In another step than these, there are units to gather that weren't before.
        """
        if stage in self._forwards:
            begin, calls = self._forwards[stage] if self._in_forward else self._forwards.pop(stage)
            number = max((node._sequence_nr() for node in _nodes(outputs)), default=0) - begin
            agrees = self._steps & (self._steps - 1) == 0
            if agrees or number not in self._numbers[stage]:
                self._numbers[stage].add(number)
                self._note(self._bypassed(outputs, calls), stage, agrees)
        for index in sorted(self._found[stage]):
            gather_for_backward(self._units[index], (), outputs)

    def _note(self, own: set[int], stage: int, agrees: bool) -> None:
        found = self._found[stage]
        if self._group is None:
            found |= own
        elif agrees:
            found |= self._agreed(own, self._group)
        elif new := own - found:  # other ranks' graphs may be as before: they would wait, or gather other units
            names = sorted(self._names[self._units[index]] for index in new)  # type: ignore[index]
            raise StepError(
                f"The loss begins in this step to use what {', '.join(names)} keep or compute beside their output, and"
                " data ranks agree on what to gather for that in an epoch's first, second, fourth, eighth, … step only:"
                " use it from the first step on (with a weight of 0), or set reshard_after_forward=False.",
                breaks=8,
            )

    def _agreed(self, own: set[int], group: dist.ProcessGroup) -> set[int]:
        flags = torch.tensor([index in own for index in range(len(self._units))], dtype=torch.int32)
        flags = flags.to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
        return {index for index, found in enumerate(flags.tolist()) if found}

    def _bypassed(self, outputs: Any, calls: list[UnitCall]) -> set[int]:
        """The units that the outputs' gradient enters elsewhere than at their outputs, and before it is there."""
        places = {unit: index for index, unit in enumerate(self._units)}
        calls = [call for call in calls if call.unit in places]
        returned = {node: places[call.unit] for call in calls for node in call.returned}
        given = {node for call in calls for node in call.given}
        holders = self._holders()
        first: dict[int, int] = {}  # of each unit, the number of its output that the backward comes to first
        entered: dict[int, int] = {}  # of each unit, that of a node in it, reached without passing an output
        # by way of the unit's output and not yet of its arguments, a node is inside of the unit
        waiting: list[tuple[Node, int | None]] = [(node, None) for node in _nodes(outputs)]
        seen = set(waiting)
        while waiting:
            node, inside = waiting.pop()
            if node in returned:
                inside = returned[node]
                first[inside] = max(first.get(inside, 0), node._sequence_nr())
            elif node in given:
                inside = None
            for each, _ in node.next_functions:
                if each is None or (each, inside) in seen:
                    continue
                seen.add((each, inside))
                waiting.append((each, inside))
                unit = holders.get(getattr(each, "variable", None))  # type: ignore[arg-type]
                if unit is not None and unit != inside:
                    entered[unit] = max(entered.get(unit, 0), node._sequence_nr())
        # autograd runs nodes in the order of their numbers, the last first
        return {unit for unit, number in entered.items() if number > first.get(unit, -1)}

    def _holders(self) -> dict[Tensor, int]:
        """The unit of each unsharded parameter."""
        return {
            gathered: index
            for index, unit in enumerate(self._units)
            for group in groups_of(unit)
            for _, gathered in gathered_in(group)
        }


def _nodes(value: Any) -> list[Node]:
    return [tensor.grad_fn for tensor in tree.tensors(value) if tensor.grad_fn is not None]


def _next_number() -> int:
    """The number of a node that autograd makes now. They count up in each thread."""
    node: Node = torch.ones((), requires_grad=True).expand(1).grad_fn
    return int(node._sequence_nr())


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
