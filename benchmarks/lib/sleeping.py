"""Work that takes its time and no core: stages then compute as if each were on a device of its own."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F


class Sleeping(torch.autograd.Function):
    """``x``, after so many seconds; its gradient takes ``backward_s``. Tensors without data take no time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        _sleep(x, forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _sleep(gradients[0], ctx.backward_s)
        return gradients[0], None, None


class SleepingLinear(nn.Linear):
    """A linear layer whose forward takes ``seconds``, and as long each part of its backward.

    The gradient of its input sleeps behind the product. That of its weight sleeps on the way from the product to the
    weight, which a backward in two parts runs in its second part (``pipeline/runtime/split_backward.py``), and a whole
    one at once.
    """

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        weight = Sleeping.apply(self.weight, 0.0, self.seconds)
        out: Tensor = Sleeping.apply(F.linear(x, weight, self.bias), self.seconds, self.seconds)
        return out


def _sleep(x: Tensor, seconds: float) -> None:
    if seconds and not x.is_meta and not isinstance(x, FakeTensor):
        time.sleep(seconds)
