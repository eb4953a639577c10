"""Broadcasts the last stage's object to its pipeline: the object host to host, its tensors device to device.

Also one rank's tensor to a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.tree import as_bytes

_INLINE_BYTES = 512
"""Host tensors of up to this many bytes in all are sent within the first message."""
_NEW, _SAME, _SAME_INLINE = range(3)
_IMMUTABLE = (
    FunctionType,
    BuiltinFunctionType,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type,
    type(None),
    torch.dtype,
    torch.device,
)


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

    From step to step usually only the tensors differ. Then one short message says so, and nothing is pickled.

    Args:
        control: The pipeline's ranks, host to host.
        values: The same ranks, for tensors.
    """

    def __init__(self, control: dist.ProcessGroup, values: dist.ProcessGroup) -> None:
        self._control = control
        self._values = values
        self._last: Any = None
        self._slots: list[_TensorSlot] = []

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
        message = torch.zeros(1 + _INLINE_BYTES, dtype=torch.uint8)
        if _is_equal_and_immutable(self._last, skeleton):
            message[0] = _SAME
            if flat is not None and device.type == "cpu" and len(flat) <= _INLINE_BYTES:
                message[0] = _SAME_INLINE
                message[1 : 1 + len(flat)] = flat
                flat = None
            dist.broadcast(message, group=self._control, group_src=0)
        else:
            dist.broadcast(message, group=self._control, group_src=0)
            dist.broadcast_object_list([skeleton], group=self._control, group_src=0)
        self._last = skeleton
        if flat is not None:
            dist.broadcast(flat, group=self._values, group_src=0)

    def _receive(self, device: torch.device) -> Any:
        message = torch.empty(1 + _INLINE_BYTES, dtype=torch.uint8)
        dist.broadcast(message, group=self._control, group_src=0)
        if message[0] == _NEW:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, group=self._control, group_src=0)
            self._last = box[0]
            self._slots = [leaf for _, leaf in tree.walk(self._last) if isinstance(leaf, _TensorSlot)]
        size = sum(slot.bytes for slot in self._slots)
        if message[0] == _SAME_INLINE:
            flat = message[1 : 1 + size]
        else:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            if size:
                dist.broadcast(flat, group=self._values, group_src=0)
        tensors = _split(flat, self._slots)
        return tree.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, _TensorSlot) else leaf, self._last)


def values_of(source: int, tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The values of one rank's tensor, on all ranks of a group; a collective call over the group.

    Args:
        source: The rank within the group.
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


def _is_equal_and_immutable(one: Any, other: Any) -> bool:
    """Whether two trees are equal and all their leaves immutable, so that the earlier object can be returned again."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(_is_equal_and_immutable, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal_and_immutable, one, other))
    if is_dataclass(one):
        return all(_is_equal_and_immutable(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return isinstance(one, _IMMUTABLE) and bool(one == other)
