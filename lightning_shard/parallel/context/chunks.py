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

from lightning_shard.parallel.collectives import gather, in_32_bits, summed_both_ways


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
        return self.rank, 2 * self.ranks - 1 - self.rank

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """A copy of this rank's chunks of a tensor that all ranks hold whole; no communication."""
        size = whole.size(dim) // (2 * self.ranks)
        return torch.cat([whole.narrow(dim, chunk * size, size) for chunk in self.chunks], dim)


class Cut(torch.autograd.Function):
    """For an argument of a block: cut the whole tensor to this rank's part; the backward gathers, divided by ``n``."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, part: Part) -> Tensor:
        ctx.dim, ctx.part = dim, part
        return part.cut(whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (whole,) = join(ctx.dim, ctx.part, gradient)
        return whole / ctx.part.ranks, None, None


def join(dim: int, part: Part, *own: Tensor) -> list[Tensor]:
    """All-gather the ranks' parts to whole tensors, in the order of the sequence; the backward sums and cuts.

    For the output of a block, and for keys and values within a block, which each rank uses for its own queries.
    """
    wholes = []
    for of_ranks in gather(part.group, *own):
        heads, tails = zip(*(each.chunk(2, dim) for each in of_ranks))
        wholes.append(torch.cat([*heads, *reversed(tails)], dim))
    return wholes


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
        wide = gradient.to(in_32_bits(gradient.dtype))
        return (summed_both_ways(wide, ctx.part.group) / ctx.part.ranks).to(gradient.dtype), None
