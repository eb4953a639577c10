"""All-gather units whose backward begins elsewhere than at their output.

FSDP2 frees a unit's parameters after its forward, and all-gathers them when the gradient of its output arrives. A
gradient may enter a unit by another way: by a value that it keeps as an attribute, puts into a cache, or that a hook on
a submodule collects. If the output has no gradient, or a later one, the unit would compute with freed memory.

So the graph of the loss is searched for such ways: in an epoch's first, second, fourth, … step, and whenever it has
another number of nodes than before. From then on each backward begins by all-gathering the units that were found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.arguments import Node, UnitCall, recorded
from lightning_shard.parallel.fsdp.units import frees, gather_for_backward, gathered_in, groups_of, sharded_units


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
                f"The loss begins in this step to use what {', '.join(names)} keep or compute beside their output, as"
                " features collected by a hook. Data ranks hold these blocks in parts, and"
                " agree on what to gather for that in an epoch's first, second, fourth, eighth, … step only: use it"
                " from the first step on (with a weight of 0), resume from the last checkpoint, or set"
                " reshard_after_forward=False.",
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
