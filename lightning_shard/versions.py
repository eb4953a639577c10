"""Numbers that show whether a tensor or an array was changed in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from lightning_shard import tree

LARGEST_READ = 2**20
"""Elements of an array, or a tensor, that is read to tell whether it has changed in place."""


def version(value: Any) -> int:
    """A tensor's version or an array's digest, which a change in place changes; 0 of others, and of large arrays.

    A tensor's version isn't changed by a change through ``.data`` or ``.numpy()``, nor by BatchNorm.
    """
    if isinstance(value, np.ndarray):
        return digest(value) if value.size <= LARGEST_READ and not value.dtype.hasobject else 0
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def content(value: Any) -> int:
    """A digest of a tensor's values, or its version if it is large, or has none; of others their :func:`version`.

    Synchronises with the device.
    """
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta or value.numel() > LARGEST_READ:
        return version(value)
    with torch._C.DisableTorchFunction(), torch.no_grad():  # no operations of the code that is traced around it
        plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        return digest(tree.as_bytes(plain).numpy())


def digest(array: np.ndarray[Any, Any]) -> int:
    """Of an array's values."""
    return xxhash.xxh3_128_intdigest(np.ascontiguousarray(array).view(np.uint8).data)
