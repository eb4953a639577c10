"""Sequences over the ranks of a context group, and back.

A sequence of ``n`` ranks is ``2n`` chunks of one size, and rank ``i`` has chunks ``i`` and ``2n − 1 − i``: under causal
attention, where a chunk's work grows with its place, all ranks have the same work (Llama 3, arXiv:2407.21783).

**Gradients.** Around blocks every rank computes on whole sequences, and its gradients are those of the whole. Within
blocks it computes on its part, and a parameter's gradients are summands. FSDP averages both over the data and context
ranks. So gradients are multiplied by ``n`` where they enter a block, and divided by ``n`` where they leave it: then
gradients anywhere are such that their mean over the ranks is right, whatever a block uses, and where else it is used.

They enter a block as their sum over the ranks, which is ``n`` times each where they are alike. They aren't where a
later block uses what was computed from this one's output without being given it, such as an attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """This rank's part of every sequence.

    Attributes:
        group: The ranks that hold the parts of one sequence.
        rank, ranks: This one's place among them, and how many they are.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Part:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def chunks(self) -> tuple[int, int]:
        """The places of this rank's two chunks, of ``2 × ranks``."""
        return self._chunks_of(self.rank)

    def _chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's chunks of what all ranks hold whole, a copy; no collective."""
        return self._cut_for(self.rank, whole, dim)

    def _cut_for(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        size = whole.size(dim) // (2 * self.ranks)
        return torch.cat([whole.narrow(dim, chunk * size, size) for chunk in self._chunks_of(rank)], dim)

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """The whole of all ranks' parts, in the order of the sequence, a copy; a collective call over the group."""
        own = own.contiguous()
        joined = own.new_empty(self.ranks, *own.shape)
        dist.all_gather(list(joined.unbind()), own, group=self.group)
        heads, tails = zip(*(part.chunk(2, dim) for part in joined))
        return torch.cat([*heads, *reversed(tails)], dim)

    def sum(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum of what each rank holds whole; a collective call over the group.

        Added up in 32 bits where it is in 16, as one process does, which has one sum over all positions.
        """
        given = torch.stack([self._cut_for(rank, whole, dim) for rank in range(self.ranks)])
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        wide = torch.float32 if whole.dtype in (torch.bfloat16, torch.float16) else None
        return taken.sum(0, dtype=wide).to(whole.dtype)


class Cut(torch.autograd.Function):
    """What a block is given: whole, to this rank's part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, part: Part) -> Tensor:
        ctx.dim, ctx.part = dim, part
        return part.cut(whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = Gather.apply(ctx.dim, ctx.part, 1 / ctx.part.ranks, gradient)
        return whole, None, None


def join(own: Tensor, dim: int, part: Part) -> Tensor:
    """What a block returns: this rank's part, to the whole."""
    (whole,) = Gather.apply(dim, part, 1, own)
    return whole  # type: ignore[no-any-return]


def share(whole: Tensor, part: Part) -> Tensor:
    """What a block is given whole, on every rank."""
    return _Share.apply(whole, part)  # type: ignore[no-any-return]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Mean.apply(gradient, ctx.part), None


class _Mean(torch.autograd.Function):
    """Over the ranks; the gradient is that of all their losses."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Part) -> Tensor:
        ctx.part = part
        summed = whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)
        dist.all_reduce(summed, group=part.group)
        return summed.div_(part.ranks).to(whole.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Mean.apply(gradient, ctx.part), None


class Gather(torch.autograd.Function):
    """Each rank's parts to wholes, multiplied by ``by``: what a block returns; or keys and values within it, which each
    rank's queries use differently.

    One function for both of these, so that every rank's backward sends their gradients in one order.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, part: Part, by: float, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.given = dim, part, by
        return tuple(_times(part.gather(tensor, dim), by) for tensor in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_Sum.apply(*ctx.given, *gradients)


class _Sum(torch.autograd.Function):
    """The other way: each rank's parts of the wholes' sums."""

    @staticmethod
    def forward(ctx: Any, dim: int, part: Part, by: float, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.given = dim, part, by
        return tuple(_times(part.sum(tensor, dim), by) for tensor in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *Gather.apply(*ctx.given, *gradients)


def _times(made: Tensor, by: float) -> Tensor:
    return made if by == 1 else made.mul_(by)
