"""Blocks that change a dict of a class that keeps its items as attributes, too."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import WIDTH, Descends, batches


class Attributes(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.__dict__[name] = value

    __setattr__ = __setitem__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Any) -> Tensor:
        state.aux = state.aux + x.square().mean()
        return self.linear(x).tanh()


class Module(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        state, x = Attributes(), batch
        state.aux = batch.new_zeros(())
        for block in self.blocks:
            x = block(x, state)
        return F.mse_loss(x, batch) + state.aux


def test_later_stages_read_what_blocks_have_set() -> None:
    assert_trains_alike(Module, batches, layouts=["pp2"])
