"""Imitates what GPU kernels save for backward, where the CPU's kernels save something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AsOnDevices(TorchFunctionMode):
    """On fake CPU tensors: replaces operations that save something else for backward on a GPU.

    On a GPU, dropout saves a mask of bytes, and attention with dropout only the random generator's state.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
        elif func is functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input
