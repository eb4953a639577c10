"""A CPU tensor's memory as bytes, and views of its boxes.

Of torch's private parts this uses ``_foreach_copy_`` (2.11 to 2.13): one call for many small tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.store import Buffer


def byte_view(tensor: Tensor) -> Buffer:
    """A contiguous CPU tensor's memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    # not reshape(-1), which leaves a single element its odd stride
    array: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


SMALL_BYTES = 2**16
"""Tensors up to this are copied by one call for all: one for each would take longer than its bytes."""


def rooms_like(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Buffer]]:
    """For each tensor new CPU memory of its shape and dtype, in row-major order without gaps, and the bytes of it.

    Those of one dtype lie in one piece: making each by itself takes longer than the bytes of small ones.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(number)
    rooms: dict[int, tuple[Tensor, Buffer]] = {}
    for dtype, numbers in by_dtype.items():
        lengths = [tensors[number].numel() for number in numbers]
        together = torch.empty(sum(lengths), dtype=dtype)
        memory, begin = byte_view(together), 0
        for number, flat in zip(numbers, together.split(lengths)):
            end = begin + flat.nbytes
            rooms[number] = flat.view(tensors[number].shape), memory[begin:end]
            begin = end
    return [rooms[number] for number in range(len(tensors))]


def fill(copies: Iterable[tuple[Tensor, Tensor, Buffer]]) -> None:
    """Fill tensors with what is in others of the same shape and dtype, whose bytes are given too."""
    small: list[tuple[Tensor, Tensor]] = []
    for target, data, memory in copies:
        if target.device.type != "cpu" or target.is_conj() or target.is_neg():
            target.copy_(data)
        elif memory.nbytes > SMALL_BYTES and target.is_contiguous():
            byte_view(target)[:] = memory  # a plain memcpy, about twice as fast as Tensor.copy_ of one thread
        else:
            small.append((target, data))
    if small:
        with torch.inference_mode():  # where tensors of that mode may be written to as well
            torch._foreach_copy_([target for target, _ in small], [data for _, data in small])


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's elements lie in CPU memory in row-major order without gaps."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def narrow(tensor: Tensor, box: Box) -> Tensor:
    """A view of a box of a tensor."""
    view: Any = tensor
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
        if size != view.shape[dim]:
            view = view.narrow(dim, offset, size)
    return view
