"""Sequences over the ranks of a context group, and attention of each rank's queries to keys and values of all of them.

A block calls ``torch.nn.functional.scaled_dot_product_attention``, which is replaced while the block runs. The
replacement all-gathers keys and values from the context ranks, in the order of the sequence, and each of this rank's
two chunks of queries attends to them. The kernels of every device support this, and each query's softmax is computed
in one piece, as in one process. Which chunks a rank has, and what is done to gradients where they enter and leave a
block: ``docs/decisions/sequences.md``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_shard.errors import StepError
from lightning_shard.parallel.collectives import gather, in_32_bits, summed_both_ways
from lightning_shard.torch_private import (
    attention_replaced,
    checkpointed_functions_replaced,
    without_dispatch_modes,
)


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


_SEQUENCE = -2
"""The dim of queries, keys and values, ``[…, sequence, features]``, and of a mask's rows."""
_PLAIN = F.scaled_dot_product_attention


@contextmanager
def attention_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, ``F.scaled_dot_product_attention`` is replaced by ``function``; ``nn.MultiheadAttention`` calls it too.

    Functions that are checkpointed inside call ``function`` in the backward too. Code that has imported
    ``scaled_dot_product_attention`` by name still calls torch's.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with attention_replaced(function), checkpointed_functions_replaced(partial(_attending, function)):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _attending(attention: Callable[..., Tensor], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is checkpointed in a block's own code, with the block's attention in the backward too.

    A backward runs it when the block's forward has ended. Ranks that run the same blocks recompute the same functions
    in the same order, so these may hold collectives.
    """

    def attending(*args: Any, **kwargs: Any) -> Any:
        with attention_by(attention):
            return function(*args, **kwargs)

    return attending


@functools.cache
def _lower_right(size: int, end: int) -> Tensor:
    """The causal mask for a chunk of ``size`` queries, the last of which is at position ``end − 1``.

    Dispatch modes, such as that of selective checkpointing, don't support its class.
    """
    with without_dispatch_modes():
        return causal_lower_right(size, end)


def over_ranks(part: Part, length: int) -> Callable[..., Tensor]:
    """A replacement of ``scaled_dot_product_attention`` for this rank's ``length`` positions of each sequence.

    Raises:
        StepError: In a call: attention has dropout, isn't over the block's own sequence, or has a mask of another size.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise StepError(
                f"Attention has dropout_p={dropout_p}, and context ranks would drop other weights than one process: set"
                " the dropout of attention to 0, or use context_parallel_size=1."
            )
        for name, tensor in (("queries", query), ("keys", key), ("values", value)):
            if tensor.size(_SEQUENCE) != length:
                raise StepError(
                    f"Attention in a block has {name} of {tensor.size(_SEQUENCE)} positions, and this rank's part of"
                    f" the block's sequence has {length}: context_parallel_size deals attention among all positions of"
                    " the block's own sequence only. Use context_parallel_size=1."
                )
        rows = None if attn_mask is None else _own_rows(attn_mask, part, length)
        query, key, value = _cast(query, key, value)
        key, value = join(_SEQUENCE, part, key, value)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        with attention_by(_PLAIN):
            if is_causal and attn_mask is None:
                size = length // 2
                outputs = [
                    _causal(chunk, key, value, (place + 1) * size, options)
                    for chunk, place in zip(query.split(size, _SEQUENCE), part.chunks)
                ]
                return torch.cat(outputs, _SEQUENCE)
            return _PLAIN(query, key, value, attn_mask=rows, is_causal=is_causal, **options)

    return attention


def _causal(query: Tensor, key: Tensor, value: Tensor, end: int, options: dict[str, Any]) -> Tensor:
    """Causal attention of queries, the last of which is at position ``end − 1``; later keys aren't read."""
    size = query.size(_SEQUENCE)
    key, value = key.narrow(_SEQUENCE, 0, end), value.narrow(_SEQUENCE, 0, end)
    if end == size:
        return _PLAIN(query, key, value, is_causal=True, **options)
    return _PLAIN(query, key, value, attn_mask=_lower_right(size, end), **options)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does in attention, but before the all-gather: fewer bytes are sent, and all have one dtype."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _own_rows(mask: Tensor, part: Part, length: int) -> Tensor:
    """This rank's rows of a mask ``[…, queries or 1, keys or 1]`` over whole sequences."""
    whole = part.ranks * length
    rows, columns = (mask.size(_SEQUENCE) if mask.ndim > 1 else 1), mask.size(-1)
    if rows not in (1, whole) or columns not in (1, whole):
        raise StepError(
            f"Attention in a block has a mask of {rows} rows and {columns} columns, and its sequences have {whole}"
            f" positions, of which this rank computes {length}: with context_parallel_size masks must be of whole"
            " sequences, made outside of blocks and given to them, or use is_causal=True."
        )
    return mask if rows == 1 else part.cut(mask, _SEQUENCE)
