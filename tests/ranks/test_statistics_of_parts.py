"""Statistics of a block's layers that the network calls by themselves, with several stages on a rank."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()


class Module(L.LightningModule):
    """As torch_geometric's DeepGCN: the first block's layer begins, and its norm ends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first: Block = self.blocks[0]  # type: ignore[assignment]
        x = first.layer(batch)
        for block in self.blocks[1:]:
            x = block(x)
        return (self.head(first.norm(x)) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(size, WIDTH, generator=made) for size in (8, 8, 6, 8)]


def test_they_are_those_of_one_process() -> None:
    whole = {"pipeline_parallel_size": 2, "microbatches": 1}
    assert_trains_alike(Module, batches, layouts=[whole, {**whole, "schedule": "Interleaved1F1B"}])
