"""Work that takes its time and no core: stages then compute as if each were on a device of its own."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Sleeping(torch.autograd.Function):
    """``x``, after so many seconds; its gradient takes twice that. Tensors without data take no time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(x, seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _sleep(gradients[0], 2 * ctx.seconds)
        return gradients[0], None


def _sleep(x: Tensor, seconds: float) -> None:
    if not x.is_meta and not isinstance(x, FakeTensor):
        time.sleep(seconds)
