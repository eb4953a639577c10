"""Broadcasts the last stage's object to its pipeline: the object host to host, its tensors device to device.

Also one rank's tensor to a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.tree import as_bytes

_INLINE_BYTES = 512
"""Host tensors of up to this many bytes in all are sent with the object."""


@dataclass(frozen=True)
class _TensorSlot(tree.Leaf):
    """Stands in the broadcast object for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Broadcaster:
    """Broadcasts a value from a pipeline's first rank, which holds the last stage, to its other ranks.

    Args:
        control: The pipeline's ranks, host to host.
        values: The same ranks, for tensors.
    """

    def __init__(self, control: dist.ProcessGroup, values: dist.ProcessGroup) -> None:
        self._control = control
        self._values = values

    def broadcast(self, value: Any, device: torch.device) -> Any:
        """Return the first rank's value on all ranks; a collective call. On the first rank it is the same object.

        Args:
            value: A tree of tensors and picklable objects; ignored on receiving ranks.
            device: This rank's device. Sending tensors that are on it waits for no device; other tensors are pickled.
        """
        if dist.get_world_size(self._control) == 1:
            return value
        if dist.get_rank(self._control):
            return self._receive(device)
        self._send(value, device)
        return value

    def _send(self, value: Any, device: torch.device) -> None:
        sent: list[Tensor] = []

        def slot_or_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if not _is_sent_directly(leaf, device):
                return leaf.detach().cpu()
            sent.append(leaf.detach().resolve_conj().resolve_neg())
            return _TensorSlot(tuple(leaf.shape), leaf.dtype)

        skeleton = tree.map_leaves(slot_or_leaf, value)
        flat = _concatenated(sent)
        inline = None
        if flat is not None and device.type == "cpu" and len(flat) <= _INLINE_BYTES:
            inline, flat = flat.numpy().tobytes(), None
        dist.broadcast_object_list([(skeleton, inline)], group=self._control, group_src=0)
        if flat is not None:
            dist.broadcast(flat, group=self._values, group_src=0)

    def _receive(self, device: torch.device) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, group=self._control, group_src=0)
        skeleton, inline = box[0]
        slots = tree.leaves(skeleton, _TensorSlot)
        if inline is not None:
            flat = torch.frombuffer(bytearray(inline), dtype=torch.uint8)
        else:
            flat = torch.empty(sum(slot.bytes for slot in slots), dtype=torch.uint8, device=device)
            if len(flat):
                dist.broadcast(flat, group=self._values, group_src=0)
        tensors = _split(flat, slots)
        return tree.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, _TensorSlot) else leaf, skeleton)


def values_of(source: int, tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The values of one rank's tensor, on all ranks of a group, on ``device``; a collective call over the group.

    Args:
        source: The rank within the group.
        tensor: This rank's, of the same shape and dtype, on any device.
        device: Where this rank computes, which the group's backend serves.
    """
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
    dist.broadcast(as_bytes(values), group=group, group_src=source)  # not every backend supports every dtype
    return values


def _is_sent_directly(tensor: Tensor, device: torch.device) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.device == device


def _concatenated(tensors: list[Tensor]) -> Tensor | None:
    """The tensors' bytes, concatenated."""
    parts = [as_bytes(tensor.contiguous()) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else None


def _split(flat: Tensor, slots: list[_TensorSlot]) -> Iterator[Tensor]:
    """Split into tensors with memory of their own: keeping one alive keeps no other."""
    for slot, part in zip(slots, flat.split([slot.bytes for slot in slots])):
        yield part.clone().view(slot.dtype).reshape(slot.shape)
