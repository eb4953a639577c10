"""What small modules of these tests share: gradient descent, and random batches."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor


class Descends(L.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def random_batches(*shape: int, count: int = 3) -> list[Tensor]:
    return [*torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))]
