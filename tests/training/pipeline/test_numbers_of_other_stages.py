"""Numbers that torch or Python take from an earlier stage's tensors, and state made of several stages' values."""

from __future__ import annotations

import pickle

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_shard.testing import assert_trains_alike
from tests.training.habits.harness import Block, Net


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mean = MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.net.embed(batch["x"])
        states = []
        for block in self.net.blocks:
            x = block(x)
            states.append(x.detach())
            self.mean.update(states[-1].mean())
        weight = self.weight(states[0].abs().mean())
        loss = F.mse_loss(self.net.head(x), batch["y"]) * weight
        self.log("train_loss", loss)
        self.log("weight", weight)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def weight(self, mean: Tensor) -> Tensor:
        count = (mean * 100).long() % 5 + 2
        sizes = len(torch.zeros(count)) + torch.eye(count).sum() + F.pad(torch.ones(2), (0, count)).numel()
        limits = torch.linspace(0, 9, 10).clamp(0, count).sum() + torch.full_like(sizes, count)
        copied = torch.full((2,), count).sum() + pickle.loads(pickle.dumps(count))
        shown = float(f"{count}") + float(f"{mean:.2f}") + len(f"{count!r}")
        return sizes + limits + copied + shown

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def batches() -> list[dict[str, Tensor]]:
    """Microbatches alike: what isn't linear in samples is then the whole batch's."""
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(5))
    return [{"x": each.repeat(8, 1), "y": each[:, :2].repeat(8, 1)} for each in x]


def test_they_are_those_of_one_process() -> None:
    assert_trains_alike(Module, batches, "pp2", schedule="Interleaved1F1B")
