"""What these tests share: gradient descent, random batches, and a checkpoint at a run's end."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor


class Descends(L.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def random_batches(*shape: int, count: int = 3) -> list[Tensor]:
    return [*torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))]


class SaveAtEnd(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
