"""Refuses, by name, tensors whose data isn't plain elements in memory, before anything is read from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_shard.checkpoint.format.header import dtype_name
from lightning_shard.checkpoint.tensors import is_dtensor
from lightning_shard.errors import UnsupportedStateError

_storable: set[tuple[Any, ...]] = set()
"""Kinds of tensors that passed. ``is_quantized`` isn't part of the kind: quantized tensors have their own dtypes."""


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise UnsupportedStateError for a tensor without bytes to write, or whose layout or dtype the format lacks."""
    if is_lazy(tensor):
        raise UnsupportedStateError(
            f"{name!r} is not initialized yet, as in a lazy module: run the module once before saving."
        )
    if is_dtensor(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    known = type(tensor), tensor.dtype, tensor.layout, tensor.is_nested, tensor.is_meta
    if known in _storable:
        return
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # type: ignore[comparison-overlap]
        kind = type(tensor)
        parts = ", ".join(tensor.__tensor_flatten__()[0]) if hasattr(tensor, "__tensor_flatten__") else ""
        raise UnsupportedStateError(
            f"{name!r} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass whose values aren't stored as"
            f" plain elements: save its inner tensors{parts and f' ({parts})'}, or a plain tensor of its values. In"
            f" trainer_state a codec does so: checkpoint.register_codec({kind.__qualname__}, encode, decode)."
        )
    if tensor.is_quantized:
        raise UnsupportedStateError(f"{name!r} is a quantized tensor: save its int_repr() and its scales.")
    if tensor.is_nested:
        raise UnsupportedStateError(f"{name!r} is a nested tensor: save its values and lengths.")
    if tensor.layout is not torch.strided:
        sparse = str(tensor.layout).startswith("torch.sparse")
        raise UnsupportedStateError(
            f"{name!r} has layout {tensor.layout}, which the checkpoint can't hold: save"
            f" {'its indices and values' if sparse else 'it as a plain tensor, by to_dense()'}."
        )
    if tensor.device.type == "meta":
        raise UnsupportedStateError(f"{name!r} is on the meta device and has no data: materialize it before saving.")
    dtype_name(tensor.dtype, name)
    _storable.add(known)
