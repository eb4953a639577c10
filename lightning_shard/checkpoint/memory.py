"""A CPU tensor's memory as bytes, and views of its boxes."""

from __future__ import annotations

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
