"""Broadcasts the last stage's object to its pipeline: the object host to host, its tensors device to device."""

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

_WITHIN_BYTES = 512
"""Host tensors of up to this many bytes in all are sent within the first message."""
_OTHER, _SAME, _SAME_WITHIN = range(3)
_COMPARED = (
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
class _Place(tree.Leaf):
    """Stands in the broadcast object for a tensor that is sent separately."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Teller:
    """Broadcasts a value from a pipeline's first rank, which holds the last stage, to its other ranks.

    From step to step usually only the tensors differ. Then one short message says so, and nothing is pickled.

    Args:
        control: The pipeline's ranks, host to host.
        values: The same ranks, for tensors.
    """

    def __init__(self, control: dist.ProcessGroup, values: dist.ProcessGroup) -> None:
        self._control = control
        self._values = values
        self._before: Any = None
        self._places: list[_Place] = []

    def tell(self, value: Any, device: torch.device) -> Any:
        """Return the first rank's value on all ranks; a collective call. On the first rank it is the same object.

        Args:
            value: A tree of tensors and picklable objects; ignored on receiving ranks.
            device: This rank's device. Sending tensors that are on it waits for no device; other tensors are pickled.
        """
        if dist.get_world_size(self._control) == 1:
            return value
        if dist.get_rank(self._control):
            return self._hear(device)
        self._say(value, device)
        return value

    def _say(self, value: Any, device: torch.device) -> None:
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
        message = torch.zeros(1 + _WITHIN_BYTES, dtype=torch.uint8)
        if _is_same(self._before, skeleton):
            message[0] = _SAME
            if flat is not None and device.type == "cpu" and len(flat) <= _WITHIN_BYTES:
                message[0] = _SAME_WITHIN
                message[1 : 1 + len(flat)] = flat
                flat = None
            dist.broadcast(message, group=self._control, group_src=0)
        else:
            dist.broadcast(message, group=self._control, group_src=0)
            dist.broadcast_object_list([skeleton], group=self._control, group_src=0)
        self._before = skeleton
        if flat is not None:
            dist.broadcast(flat, group=self._values, group_src=0)

    def _hear(self, device: torch.device) -> Any:
        message = torch.empty(1 + _WITHIN_BYTES, dtype=torch.uint8)
        dist.broadcast(message, group=self._control, group_src=0)
        if message[0] == _OTHER:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, group=self._control, group_src=0)
            self._before = box[0]
            self._places = [leaf for _, leaf in tree.walk(self._before) if isinstance(leaf, _Place)]
        size = sum(place.bytes for place in self._places)
        if message[0] == _SAME_WITHIN:
            flat = message[1 : 1 + size]
        else:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
            if size:
                dist.broadcast(flat, group=self._values, group_src=0)
        tensors = _apart(flat, self._places)
        return tree.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, _Place) else leaf, self._before)


def _travels(tensor: Tensor, device: torch.device) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and tensor.device == device


def _together(tensors: list[Tensor]) -> Tensor | None:
    """The tensors' bytes, concatenated."""
    parts = [as_bytes(tensor.contiguous()) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else None


def _apart(flat: Tensor, places: list[_Place]) -> Iterator[Tensor]:
    """Split into tensors with memory of their own: keeping one alive keeps no other."""
    for place, part in zip(places, flat.split([place.bytes for place in places])):
        yield part.clone().view(place.dtype).reshape(place.shape)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two trees are equal and all their leaves immutable, so that the earlier object can be returned again."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if is_dataclass(one):
        return all(_is_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return isinstance(one, _COMPARED) and bool(one == other)
