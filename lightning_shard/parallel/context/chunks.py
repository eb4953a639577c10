"""Shard sequences over the ranks of a context group, and gather them again, with correct gradients.

For ``n`` ranks, a sequence is divided into ``2n`` chunks of equal size. Rank ``i`` has chunks ``i`` and
``2n − 1 − i``: under causal attention, a chunk's work grows with its index, so all ranks have the same work (Llama 3,
arXiv:2407.21783).

**Gradients.** Outside of blocks every rank computes on whole sequences, and a parameter's gradient on each rank is the
whole gradient. Within blocks each rank computes on its part, and a parameter's gradient is a summand. FSDP2 averages
both over the data and context ranks. So in the backward, gradients are multiplied by ``n`` where they enter a block,
and divided by ``n`` where they leave it. Then the mean over the ranks is correct for every parameter, whatever a block
uses, and wherever else it is used.

The multiplication is a sum over the ranks, which is ``n`` times the gradient if it is equal on all of them. It isn't
equal if a later block uses something computed from this block's output that isn't one of its arguments, such as an
attribute.
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
        rank: This rank's index in the group.
        ranks: The number of ranks in the group.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Part:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def chunks(self) -> tuple[int, int]:
        """The indices of this rank's two chunks, out of ``2 × ranks``."""
        return self._chunks_of(self.rank)

    def _chunks_of(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.ranks - 1 - rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """A copy of this rank's chunks of a tensor that all ranks hold whole; no communication."""
        return self._cut_for(self.rank, whole, dim)

    def _cut_for(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        size = whole.size(dim) // (2 * self.ranks)
        return torch.cat([whole.narrow(dim, chunk * size, size) for chunk in self._chunks_of(rank)], dim)

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """All-gather the ranks' parts to the whole tensor, in the order of the sequence. Collective over the group."""
        own = own.contiguous()
        joined = own.new_empty(self.ranks, *own.shape)
        dist.all_gather(list(joined.unbind()), own, group=self.group)
        heads, tails = zip(*(part.chunk(2, dim) for part in joined))
        return torch.cat([*heads, *reversed(tails)], dim)

    def sum(self, whole: Tensor, dim: int) -> Tensor:
        """Reduce-scatter: this rank's part of the sum of the ranks' whole tensors. Collective over the group.

        16-bit tensors are summed in 32 bits, as in one process, which has one sum over all positions.
        """
        given = torch.stack([self._cut_for(rank, whole, dim) for rank in range(self.ranks)])
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        wide = torch.float32 if whole.dtype in (torch.bfloat16, torch.float16) else None
        return taken.sum(0, dtype=wide).to(whole.dtype)


class Cut(torch.autograd.Function):
    """For an argument of a block: cut the whole tensor to this rank's part; the backward gathers, divided by ``n``."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, part: Part) -> Tensor:
        ctx.dim, ctx.part = dim, part
        return part.cut(whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = Gather.apply(ctx.dim, ctx.part, 1 / ctx.part.ranks, gradient)
        return whole, None, None


def join(own: Tensor, dim: int, part: Part) -> Tensor:
    """For the output of a block: all-gather the ranks' parts; the backward sums and cuts (reduce-scatter)."""
    (whole,) = Gather.apply(dim, part, 1, own)
    return whole  # type: ignore[no-any-return]


def share(whole: Tensor, part: Part) -> Tensor:
    """For a whole argument of a block: identity; the backward averages gradients over the ranks."""
    return _Share.apply(whole, part)  # type: ignore[no-any-return]


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Part) -> Tensor:
        ctx.part = part
        return whole.detach()  # not a view, which the block couldn't change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Mean.apply(gradient, ctx.part), None


class _Mean(torch.autograd.Function):
    """Mean over the ranks; the backward averages the gradients of all ranks' losses in the same way."""

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
    """All-gather of parts to whole tensors, times ``by``; the backward is a reduce-scatter, also times ``by``.

    Used for a block's output, and for keys and values within a block, which each rank uses for its own queries. One
    function takes keys and values, so that every rank's backward sends their gradients in the same order.
    """

    @staticmethod
    def forward(ctx: Any, dim: int, part: Part, by: float, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.given = dim, part, by
        return tuple(_times(part.gather(tensor, dim), by) for tensor in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_Sum.apply(*ctx.given, *gradients)


class _Sum(torch.autograd.Function):
    """Reduce-scatter, times ``by``: this rank's parts of the sums of whole tensors; the backward of :class:`Gather`."""

    @staticmethod
    def forward(ctx: Any, dim: int, part: Part, by: float, *wholes: Tensor) -> tuple[Tensor, ...]:
        ctx.given = dim, part, by
        return tuple(_times(part.sum(tensor, dim), by) for tensor in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *Gather.apply(*ctx.given, *gradients)


def _times(made: Tensor, by: float) -> Tensor:
    return made if by == 1 else made.mul_(by)
