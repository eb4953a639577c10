"""Differentiable collective calls, each other's backwards, so that second-order gradients are right too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
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


def gather(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """All-gather of equally large tensors: ``[ranks, *tensor.shape]`` each; the backward sums all ranks' gradients.

    One call takes several tensors, so that every rank's backward sends their gradients in the same order.
    """
    return _Gather.apply(group, *tensors)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    """All-gather; torch's own (2.13) confuses ranks of a group and of the world on backends without reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        gathered = tuple(tensor.new_empty(dist.get_world_size(group), *tensor.shape) for tensor in tensors)
        for all_ranks, tensor in zip(gathered, tensors):
            dist.all_gather(list(all_ranks.unbind()), tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Sum.apply(ctx.group, *gradients)


class _Sum(torch.autograd.Function):
    """Reduce-scatter, the backward of the all-gather: this rank's row of the sum of all ranks' ``[ranks, …]``.

    16-bit tensors are summed in 32 bits, as one process sums over all that it has in one sum.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        each = [1] * dist.get_world_size(group)
        taken = [all_to_all(rows, group, each, each) for rows in tensors]
        return tuple(rows.sum(0, dtype=in_32_bits(rows.dtype)).to(rows.dtype) for rows in taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Gather.apply(ctx.group, *gradients)


def in_32_bits(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def shared(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity in the forward, all-reduce in the backward: for a replicated value used in a part of a computation.

    This function and :func:`summed` are each other's backward. DTensor's ``from_local`` and ``to_local`` have no
    second-order gradients (torch 2.13: ``_FromTorchTensor.backward``).
    """
    return _Shared.apply(value, group)  # type: ignore[no-any-return, no-untyped-call]


def summed(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in the forward, identity in the backward: every rank has the whole gradient of the sum."""
    return _Summed.apply(part, group)  # type: ignore[no-any-return, no-untyped-call]


def summed_both_ways(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in the forward, and in the backward, of the gradients of all ranks' losses."""
    return shared(summed(part, group), group)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.detach()  # not a view, which the user's code couldn't change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return summed(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.wait_tensor(collectives.all_reduce(part.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return shared(gradient, ctx.group), None
