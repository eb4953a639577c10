"""All-gather units whose backward begins elsewhere than at their output.

FSDP2 frees a unit's parameters after its forward, and all-gathers them when the gradient of its output arrives. A
gradient may enter a unit by another way: by a value that it keeps as an attribute, puts into a cache, or that a hook on
a submodule collects. If the output has no gradient, or a later one, the unit would compute with freed memory.

So in some steps the graph of the loss is searched for such ways. From then on each backward begins by all-gathering
the units that were found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard import tree
from lightning_shard.parallel.fsdp.units import gather_for_backward, groups_of, sharded_units

Node = Any
"""A node of autograd's graph."""


@dataclass(frozen=True)
class _Call:
    """A call of a unit: the nodes that made its arguments and its output."""

    unit: int
    given: list[Node]
    returned: list[Node]


class BypassedUnits:
    """Finds and gathers the units of one model.

    Args:
        root: The model, sharded.
        group: The data ranks, of which each must gather the same units.
        device: Where tensors of that group's collectives are.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        frees = (unit for unit in sharded_units(root) if any(g._reshard_after_forward for g in groups_of(unit)))
        self._units: list[FSDPModule] = [unit for unit in frees if unit is not root]
        self._group = group
        self._device = device
        self._calls: list[_Call] = []
        self._is_watched = False
        self._found: set[int] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of a step's forward, of whose losses the graph will be searched."""
        self._is_watched = bool(self._units)
        self._calls.clear()
        with ExitStack() as hooks:
            for index, unit in enumerate(self._units):
                note: Any = partial(self._note, index)
                hooks.callback(unit.register_forward_hook(note, with_kwargs=True).remove)  # type: ignore[attr-defined]
            yield

    def _note(self, index: int, _: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.append(_Call(index, _nodes((args, kwargs)), _nodes(output)))

    def gather(self, loss: Tensor) -> None:
        """Have the backward of a loss begin by all-gathering the bypassed units.

        A collective call over the data ranks if its forward was watched.
        """
        if self._is_watched:
            own = self._bypassed(loss)
            flags = torch.tensor([index in own for index in range(len(self._units))], dtype=torch.int32)
            flags = flags.to(self._device)
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
            self._found.update(index for index, found in enumerate(flags.tolist()) if found)
        for index in sorted(self._found):
            gather_for_backward(self._units[index], (), loss)

    def end_step(self) -> None:
        self._is_watched = False
        self._calls.clear()

    def _bypassed(self, loss: Tensor) -> set[int]:
        """The units that the gradient of a loss enters elsewhere than at their outputs, and before it is there."""
        returned = {node: call.unit for call in self._calls for node in call.returned}
        given = {node for call in self._calls for node in call.given}
        holders = self._holders()
        outputs: dict[int, int] = {}  # of each unit, the number of its output that the backward comes to first
        entered: dict[int, int] = {}  # of each unit, that of a node in it, reached without passing an output
        # by way of the unit's output and not yet of its arguments, a node is inside of the unit
        waiting: list[tuple[Node, int | None]] = [(node, None) for node in _nodes(loss)]
        seen = set(waiting)
        while waiting:
            node, inside = waiting.pop()
            if node in returned:
                inside = returned[node]
                outputs[inside] = max(outputs.get(inside, 0), node._sequence_nr())
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
        return {unit for unit, number in entered.items() if number > outputs.get(unit, -1)}

    def _holders(self) -> dict[Tensor, int]:
        """The unit of each unsharded parameter."""
        groups = ((index, group) for index, unit in enumerate(self._units) for group in groups_of(unit))
        parameters = ((index, parameter) for index, group in groups for parameter in group.fsdp_params)
        return {p._unsharded_param: index for index, p in parameters if hasattr(p, "_unsharded_param")}


def _nodes(value: Any) -> list[Node]:
    return [tensor.grad_fn for tensor in tree.tensors(value) if tensor.grad_fn is not None]
