"""What the last stage tells the others: an object from host to host, and its tensors from device to device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.pipeline import tree

_WITHIN_BYTES = 1024
"""Tensors of the host up to so many bytes go with the object."""


@dataclass(frozen=True)
class _Place(tree.Leaf):
    """In place of a tensor, which travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def tell(value: Any, *, control: dist.ProcessGroup, values: dist.ProcessGroup, device: torch.device) -> Any:
    """The value of the groups' first rank, on all of their ranks; a collective call. There it is itself.

    Args:
        value: A tree of anything that can be pickled, and of tensors; ``None`` on ranks that are told.
        control: Of the ranks' hosts.
        values: The same ranks, for tensors of ``device``.
        device: Of this rank. Tensors there aren't waited for; any others go as what can be pickled.
    """
    if dist.get_world_size(control) == 1:
        return value
    if dist.get_rank(control):
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=control, group_src=0)
        skeleton, within = box[0]
        places = [leaf for _, leaf in tree.walk(skeleton) if isinstance(leaf, _Place)]
        tensors = _apart(_received(within, sum(p.bytes for p in places), values, device), places)
        return tree.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, _Place) else leaf, skeleton)
    sent: list[Tensor] = []

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not _travels(leaf, device):
            return leaf.detach().cpu()
        sent.append(leaf.detach().resolve_conj().resolve_neg())
        return _Place(tuple(leaf.shape), leaf.dtype)

    skeleton = tree.map_leaves(place, value)
    flat = _together(sent)
    within = None
    if flat is not None and device.type == "cpu" and len(flat) <= _WITHIN_BYTES:
        within = flat.numpy().tobytes()
    dist.broadcast_object_list([(skeleton, within)], group=control, group_src=0)
    if flat is not None and within is None:
        dist.broadcast(flat, group=values, group_src=0)
    return value


def _travels(tensor: Tensor, device: torch.device) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.device == device


def _together(tensors: list[Tensor]) -> Tensor | None:
    """Their bytes."""
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else None


def _apart(flat: Tensor, places: list[_Place]) -> Iterator[Tensor]:
    """Each of its own memory: one that is kept doesn't keep the others."""
    for place, part in zip(places, flat.split([place.bytes for place in places])):
        yield part.clone().view(place.dtype).reshape(place.shape)


def _received(within: bytes | None, size: int, values: dist.ProcessGroup, device: torch.device) -> Tensor:
    if within is not None:
        return torch.frombuffer(bytearray(within), dtype=torch.uint8)
    flat = torch.empty(size, dtype=torch.uint8, device=device)
    if size:
        dist.broadcast(flat, group=values, group_src=0)
    return flat
