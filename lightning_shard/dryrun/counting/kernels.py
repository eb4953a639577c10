"""What a GPU's kernels keep, where those of the CPU keep something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class AsOnDevices(TorchFunctionMode):
    """On fake tensors of the CPU, the operations by which a GPU would compute, where they keep something else.

    There dropout keeps a mask of bytes, and attention with dropout the state of the random generator.
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
