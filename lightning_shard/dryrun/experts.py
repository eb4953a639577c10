"""A mixture's experts on ranks of their own, where no other rank is there to say how many tokens it sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.parallel.expert import Dispatched
from lightning_shard.parallel.expert_lists import Owner, experts_of

_aten = torch.ops.aten


class DealtEvenly(Dispatched):
    """Tokens are taken to be spread evenly: each rank sends as many rows to each other as it gets from it."""

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        ranks, rows = self._mesh.size(), len(chosen)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return sizes, sizes, chosen.new_empty(rows)


class ListDealtEvenly(Owner):
    """The same for experts in a list, and for the rows that the code around it picks for each."""

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
        """There are no values that could differ."""


class PickedEvenly(TorchDispatchMode):
    """On fake tensors: code that looks which tokens chose an expert finds each expert's share of all choices.

    Known are masks over the tokens, or over their choices, of the ``topk`` before; what else depends on values has no
    answer.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._tokens = self._choices = 0

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
        """The places, ``[rows, dims of the mask]``."""
        return mask.new_empty(self._choices // self._experts, mask.ndim, dtype=torch.long)
