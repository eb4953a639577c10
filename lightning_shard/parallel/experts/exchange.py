"""Rows from rank to rank, of which each has others for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for: ``given[r]`` of them to rank ``r``, ``taken[r]`` from it.

    One function for all tensors of a dispatch, so that every rank's backward sends their gradients in one order.
    Gradients go back multiplied by ``factor``, and theirs again as these rows went: who divides where gradients enter
    a region, and multiplies where they leave it, does so with gradients of gradients.

    Args:
        by: What the rows are multiplied by.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        given: list[int],
        taken: list[int],
        factor: float,
        by: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way_back = group, taken, given, by, factor
        sent = (all_to_all(tensor, group, given, taken) for tensor in tensors)
        return tuple(rows if by == 1 else rows.mul_(by) for rows in sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *Exchange.apply(*ctx.way_back, *gradients)


def all_to_all(rows: Tensor, group: dist.ProcessGroup, given: list[int], taken: list[int]) -> Tensor:
    received = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[ranks, *tensor.shape]`` of all ranks'; each one's gradient is that of all their losses."""
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """Torch's own (2.13) takes ranks of the world for those of a group, on backends without reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
        dist.all_gather(list(gathered.unbind()), tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    """The other way: of ``[ranks, …]``, this rank's row of all ranks' sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        each = [1] * len(rows)
        return all_to_all(rows, group, each, each).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.group), None
