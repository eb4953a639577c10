"""Objects with tensors that blocks and their submodules are given, return and keep: no stage gets a stale copy."""

from __future__ import annotations

import re
from collections import deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.errors import ShardError
from lightning_shard.testing import assert_trains_alike

WIDTH = 16


class Memory:
    """A cache as libraries write them: objects in a list in an object."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []

    def add(self, keys: Tensor) -> None:
        self.layers.append(SimpleNamespace(keys=keys))

    def sum(self) -> Tensor:
        return torch.stack([layer.keys for layer in self.layers]).sum(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        return self.linear(x).tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, memory: Memory) -> Any:
        x = x + self.attention(x, memory=memory)
        memory.add(x.detach())
        return x


class Model(L.LightningModule):
    kind: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def network(self, x: Tensor) -> Tensor:
        memory = Memory()
        for block in self.blocks:
            x = block(x, memory)
        return x + memory.sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.head(self.network(batch)), batch.roll(1, -1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Hooked(Model):
    """Collects by hooks of submodules that are given the memory too."""

    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.collected.append(output.square())

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.blocks:
            block.attention.register_forward_hook(self.collect, with_kwargs=True)

    def network(self, x: Tensor) -> Tensor:
        self.collected = []
        return super().network(x) + torch.stack(self.collected).mean(0)


class HookedOnMemory(Hooked):
    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        layers = kwargs["memory"].layers
        self.collected.append(layers[-1].keys.mean() if layers else output.mean())


class ReturnsMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        return super().forward(x, memory), memory


class Handed(Model):
    """Each block returns the memory that it is given, and the next is given what it returns."""

    kind = ReturnsMemory

    def network(self, x: Tensor) -> Tensor:
        first = memory = Memory()
        for block in self.blocks:
            x, memory = block(x, memory)
            assert memory is first
        return x + memory.sum()


class ReturnsNewMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        new = Memory()
        new.add(super().forward(x, new))
        return x, new


class NewMemories(Handed):
    kind = ReturnsNewMemory

    def network(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, memory = block(x, Memory())
        return x + memory.sum()


class Queues(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        x = super().forward(x, memory)
        memory.layers[-1].last = deque([x])
        return x


class Queued(Model):
    kind = Queues


class KeepsMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        self.seen = [x.mean(-1, keepdim=True), Memory()]
        self.seen[1].add(x)
        return super().forward(x, memory)


class Kept(Model):
    """Uses what blocks keep beside an object that holds tensors."""

    kind = KeepsMemory

    def network(self, x: Tensor) -> Tensor:
        return super().network(x) + sum(block.seen[0] for block in self.blocks)


class KeptAndUsed(Kept):
    def network(self, x: Tensor) -> Tensor:
        return super().network(x) + sum(block.seen[1].sum().mean() for block in self.blocks)


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("module", [Model, Hooked, Handed, Kept])
def test_objects_are_as_in_one_process(module: type[L.LightningModule]) -> None:
    assert_trains_alike(module, batches, ["pp2", "pp4"])


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (HookedOnMemory, "uses a Memory of what blocks.1.attention computes, on an earlier stage"),
        (KeptAndUsed, "uses a Memory of what blocks.0 keeps as seen, on an earlier stage"),
        (NewMemories, "blocks.0 returns a Memory, which can't be sent to another pipeline stage"),
        (Queued, "leaves a deque in what it is given"),
    ],
)
def test_what_would_be_the_first_microbatchs_is_refused(module: type[L.LightningModule], said: str) -> None:
    with pytest.raises((ShardError, AssertionError), match=re.escape(said)):
        assert_trains_alike(module, batches, "pp2")
