"""A 64-bit hash of a tensor's content that is the same on every layout; no rank needs the whole tensor.

Each rank sums over its shard. The hash (``docs/format.md``; γ and ``mix`` are SplitMix64's: Steele, Lea, Flood: Fast
splittable pseudorandom number generators, 2014) detects different weights; it is not cryptographic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.memory import narrow
from lightning_shard.checkpoint.ranks import Ranks, together
from lightning_shard.checkpoint.saving.part import plan_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GAMMA, _FIRST, _SECOND = (c - 2**64 for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""As int64: products wrap around."""
_SLAB_ELEMENTS = 2**18
_STORED_SLAB_ELEMENTS = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_of_all(
    tensors: Mapping[str, Tensor], mesh: DeviceMesh | None = None, group: object = None
) -> dict[str, str]:
    """Hash all ranks' tensors and DTensors. A collective call.

    Args:
        mesh: The ranks that hold this same list of tensors, as for :func:`save`.

    Returns:
        The hash of each tensor, of all ranks, as 16 hexadecimal digits by name.
    """
    ranks = Ranks.of(group)

    def own() -> tuple[tuple[int, ...], dict[str, int]]:
        part = plan_part(tensors, mesh=mesh, ranks=ranks, attempt="0" * 12, may_be_half_loaded=True)
        sums: dict[str, int] = dict.fromkeys(tensors, 0)
        for file in part.files:
            for piece, data in file.pieces():
                sums[piece.name] += content_sum(data, piece.box, piece.shape)
        for alias in part.account.aliases:
            sums[alias.name] = sums[alias.target]
        return part.account.meshes[0], sums

    def total(everyone: list[tuple[tuple[int, ...], dict[str, int]]]) -> dict[str, str]:
        sums: dict[str, int] = {}
        holders: dict[str, tuple[int, ...]] = {}
        for mesh_ranks, one in everyone:
            for name, value in one.items():
                # a tensor that several stages hold (tied weights) is counted once, from the first stage
                if holders.setdefault(name, mesh_ranks) == mesh_ranks:
                    sums[name] = sums.get(name, 0) + value
        return {name: f"{value % 2**64:016x}" for name, value in sums.items()}

    return together(ranks, own, total)


def content_of_stored(stored: StoredTensor) -> str:
    """The hash of a tensor in a checkpoint, as 16 hexadecimal digits; reads it slab by slab."""
    whole = Box.whole(stored.shape)
    sums = (content_sum(stored.box(box), box, tuple(stored.shape)) for box in slabs(whole, _STORED_SLAB_ELEMENTS))
    return f"{sum(sums) % 2**64:016x}"


def content_sum(data: Tensor, box: Box, shape: tuple[int, ...]) -> int:
    """The sum over a box of a tensor of global shape ``shape``. A 16-byte element counts as a last dim of two.

    Over all of a tensor's boxes, however it is cut, the sums add up to its hash, modulo 2**64.
    """
    data = data.detach()
    if data.element_size() > 8:
        data = torch.view_as_real(data.resolve_conj())
        box, shape = Box((*box.offsets, 0), (*box.sizes, 2)), (*shape, 2)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    total = 0
    for slab in slabs(box, _SLAB_ELEMENTS):
        part = narrow(data, slab.within(box)).resolve_conj().resolve_neg().contiguous()
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        if part.element_size() < 8:
            bits &= (1 << 8 * part.element_size()) - 1
        place = torch.ones((), dtype=torch.int64, device=part.device)
        for dim, (offset, size) in enumerate(zip(slab.offsets, slab.sizes)):
            along = torch.arange(offset, offset + size, device=part.device) * strides[dim]
            place = place + along.view([-1 if d == dim else 1 for d in range(len(shape))])
        total += int(_mixed(bits + place * _GAMMA).sum())
    return total


def _mixed(z: Tensor) -> Tensor:
    def shifted(z: Tensor, bits: int) -> Tensor:  # a logical right shift, filling with zeros
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = (z ^ shifted(z, 30)) * _FIRST
    z = (z ^ shifted(z, 27)) * _SECOND
    return z ^ shifted(z, 31)
