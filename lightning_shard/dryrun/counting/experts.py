"""Expert dispatch for counting on fake tensors, where no router values and no other ranks exist.

Routing depends on values, so it is replaced by an assumption: tokens are spread evenly over ranks and experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard import tree
from lightning_shard.parallel.experts.module_lists import Owner, experts_of
from lightning_shard.parallel.experts.stacked import Dispatched
from lightning_shard.parallel.plans import matches

_aten = torch.ops.aten


class DealtEvenly(Dispatched):
    """Ranks send each other equally many rows."""

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        ranks, rows = self._mesh.size(), len(chosen)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return sizes, sizes, chosen.new_empty(rows)

    def _compute(self, module: nn.Module, rows: Tensor, experts: Tensor, scales: Tensor, here: int) -> Tensor:
        with PickedEvenly(here, experts):
            return super()._compute(module, rows, experts, scales, here)


class WholeEvenly:
    """Replaces the forward of a stack of experts that isn't sharded; assumes that equally many tokens choose each."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._forward = module, module.forward
        self.is_asked = False  # whether the forward's code looked up which tokens chose an expert
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        integers = [t for t in tree.tensors((args, kwargs)) if t.ndim == 2 and not t.is_floating_point()]
        if len(integers) != 1:
            return self._forward(*args, **kwargs)
        with PickedEvenly(int(self.module.num_experts), integers[0]) as picked:  # type: ignore[arg-type]
            result = self._forward(*args, **kwargs)
        self.is_asked |= picked.is_asked
        return result


def stacks_named(root: nn.Module, plan: Mapping[str, str] | None) -> list[nn.Module]:
    """The stacks of experts that a user's plan names."""
    named = [module for name, module in root.named_modules() for pattern in plan or () if matches(name, pattern)]
    return [module for module in named if isinstance(getattr(module, "num_experts", None), int)]


class ListDealtEvenly(Owner):
    """As :class:`DealtEvenly` for experts in a module list; also for the rows that the code around selects for each."""

    def __call__(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with PickedEvenly(len(experts_of(owner.get_submodule(self._key)))):
            return super().__call__(owner, *args, **kwargs)

    def _agree(
        self, calls: Sequence[tuple[int, Tensor]], called: list[bool], device: torch.device
    ) -> tuple[list[list[int]], list[list[int]]]:
        ranks, here = self._mesh.size(), len(called) // self._mesh.size()
        rows = [0] * len(called)
        for place, each in calls:
            rows[place] += len(each)
            called[place] = True
        by_rank = [rows[rank * here : (rank + 1) * here] for rank in range(ranks)]
        return by_rank, by_rank

    def _check(self, run: Any) -> None:
        """Does nothing: fake tensors have no values that could differ."""


class PickedEvenly(TorchDispatchMode):
    """On fake tensors: code that selects the tokens of an expert gets an equal share of all choices.

    Recognizes bool masks over the tokens, or over their choices. Anything else that depends on values fails.

    Args:
        experts: The number of experts.
        chosen: The experts that tokens have chosen, of shape (tokens, choices per token). Default: the result of the
            last ``topk``.

    Attributes:
        is_asked: Whether any code selected by such a mask.
    """

    def __init__(self, experts: int, chosen: Tensor | None = None) -> None:
        super().__init__()
        self._experts = experts
        self._tokens, self._choices = (0, 0) if chosen is None else (len(chosen), chosen.numel())
        self.is_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.nonzero.default and self._is_mask(args[0]):
            return self._picked(args[0])
        if func is _aten.index.Tensor and any(self._is_mask(index) for index in args[1]):
            picked = [self._picked(index).unbind(1) if self._is_mask(index) else (index,) for index in args[1]]
            return func(args[0], [index for each in picked for index in each])
        if func is _aten.bincount.default and args[0].numel() in (self._tokens, self._choices):
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return args[0].new_empty(max(least, self._experts), dtype=torch.long)
        result = func(*args, **kwargs)
        if func is _aten.topk.default:
            self._choices = result[1].numel()
            self._tokens = self._choices // result[1].shape[-1]
        return result

    def _is_mask(self, index: Any) -> bool:
        is_bool = isinstance(index, Tensor) and index.dtype is torch.bool
        return is_bool and self._choices > 0 and index.numel() in (self._tokens, self._choices)

    def _picked(self, mask: Tensor) -> Tensor:
        """The indices that ``nonzero`` would give: shape (rows, dims of the mask)."""
        self.is_asked = True
        return mask.new_empty(self._choices // self._experts, mask.ndim, dtype=torch.long)
