"""Whether a tensor that several lists of ranks hold is the same on all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_shard.checkpoint.saving.files import Piece

STEP_ELEMENTS = 2**18
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# Odd numbers of 64 bits, as of splitmix64 and of the golden ratio, taken as signed.
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_MASK = 2**64 - 1


def content_sum(pieces: Iterable[Piece]) -> int:
    """Of chunks of one tensor: the sum of each element times a number made from its place, modulo 2^64.

    The sums of chunks that make up a tensor add up to the same number however it has been cut. It finds differences
    that come about by mistake; it is no protection against ones that are made on purpose.
    """
    return sum(_sum(piece) for piece in pieces) & _MASK


def _sum(piece: Piece) -> int:
    total, sizes = 0, piece.box.sizes
    flat = piece.data.detach().resolve_conj().resolve_neg().reshape(-1)
    width = flat.dtype.itemsize
    for start in range(0, flat.numel(), STEP_ELEMENTS):
        part = flat[start : start + STEP_ELEMENTS].contiguous()
        local = torch.arange(start, start + part.numel(), device=part.device)
        place = torch.zeros_like(local)
        for dim, (size, offset) in enumerate(zip(sizes, piece.box.offsets)):
            stride = math.prod(sizes[dim + 1 :])
            place += (local // stride % size + offset) * math.prod(piece.shape[dim + 1 :])
        words = part.view(_WORDS[width]).to(torch.int64)
        if width == 16:
            words = words.view(-1, 2)[:, 0] + words.view(-1, 2)[:, 1] * _MIX[2]
        total += int((words * _hash(place)).sum())
    return total


def _hash(place: Tensor) -> Tensor:
    mixed = place * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
    return (mixed ^ (mixed >> 32)) | 1
