"""What small tests share: a plain module and its batches, gradient descent, and a checkpoint at a run's end."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
INTERLEAVED = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}


class Descends(L.LightningModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Trained(L.LightningModule):
    """A plain one; others differ by what they do around the blocks, or in them."""

    block: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch), batch.roll(1, -1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.5)


def random_batches(*shape: int, count: int = 3) -> list[Tensor]:
    return [*torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))]


def batches() -> list[Tensor]:
    return random_batches(8, WIDTH)


class SaveAtEnd(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)
