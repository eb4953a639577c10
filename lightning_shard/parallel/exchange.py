"""Rows from rank to rank, of which each has others for each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class Exchange(torch.autograd.Function):
    """Rows to the ranks that they are for: ``given[r]`` of them to rank ``r``, ``taken[r]`` from it.

    One function for all tensors of a dispatch, so that every rank's backward sends their gradients in one order.
    Gradients go back multiplied by ``factor``.
    """

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, given: list[int], taken: list[int], factor: float, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way_back = group, taken, given
        ctx.factor = factor
        return tuple(all_to_all(tensor, group, given, taken) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = (all_to_all(gradient, *ctx.way_back).mul_(ctx.factor) for gradient in gradients)
        return None, None, None, None, *back


def all_to_all(rows: Tensor, group: dist.ProcessGroup, given: list[int], taken: list[int]) -> Tensor:
    received = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received
