"""Differentiable all-to-all and all-gather of rows, with backwards that can be differentiated again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(torch.autograd.Function):
    """All-to-all of rows: of each tensor, send ``send_counts[r]`` to rank ``r``, and receive ``receive_counts[r]``.

    One function takes all tensors of a dispatch, so that every rank's backward sends their gradients in the same order.
    The backward sends gradients back, multiplied by ``factor``. Its own backward sends as the forward did, multiplied
    by ``by``. So where gradients are divided as they enter a region and multiplied as they leave it, the same holds for
    second-order gradients.

    Args:
        factor: Factor of the gradients in the backward.
        by: Factor of the rows in the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        send_counts: list[int],
        receive_counts: list[int],
        factor: float,
        by: float,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.way_back = group, receive_counts, send_counts, by, factor
        sent = (all_to_all(tensor, group, send_counts, receive_counts) for tensor in tensors)
        return tuple(rows if by == 1 else rows.mul_(by) for rows in sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, None, None, *Exchange.apply(*ctx.way_back, *gradients)


def all_to_all(rows: Tensor, group: dist.ProcessGroup, send_counts: list[int], receive_counts: list[int]) -> Tensor:
    """Send ``send_counts[r]`` rows to rank ``r``; return ``receive_counts[r]`` rows from it, in the order of ranks."""
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group=group)
    return received


def gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather of equally large tensors: ``[ranks, *tensor.shape]``; the backward sums the gradients of all ranks."""
    return _Gather.apply(tensor, group)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """All-gather; torch's own (2.13) confuses ranks of a group and of the world on backends without reduce-scatter."""

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
    """Reduce-scatter, the backward of the all-gather: this rank's row of the sum of all ranks' ``[ranks, …]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        each = [1] * len(rows)
        return all_to_all(rows, group, each, each).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradient, ctx.group), None
