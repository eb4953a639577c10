"""Tensors whose values don't lie in one dense block, such as the sparse adjacency of a graph that a module holds.

Torch compares and hashes dense tensors only. A tensor of another layout is a few dense ones: indices and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_shard.tree import as_bytes

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of, in its own memory if possible; itself, if it is dense."""
    if is_dense(tensor):
        return [tensor]
    if tensor.is_nested:
        whole: Any = tensor
        return [whole.values(), whole.offsets()] if tensor.layout is torch.jagged else list(tensor.unbind())
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        return [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
    return [tensor.to_dense()]  # such as torch._mkldnn


def has_no_memory(tensor: Tensor) -> bool:
    """Whether its elements share one: expanded from less, as a hollow parameter is, or an alias of one."""
    if not is_dense(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size()))


def have_equal_values(one: Tensor, other: Tensor) -> bool:
    """``torch.equal`` for tensors of any layout and dtype. Sparse ones have to list their entries equally."""
    if one.layout is not other.layout or one.shape != other.shape:
        return False
    mine, theirs = dense_parts(one), dense_parts(other)
    return len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Tensor, other: Tensor) -> bool:
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # dtypes without comparison, such as torch.complex32
        same = one.shape == other.shape and one.dtype == other.dtype
        return same and torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))
