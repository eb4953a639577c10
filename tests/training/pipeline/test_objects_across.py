"""Objects with tensors that blocks and their submodules are given, return and keep: no stage gets a stale copy."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.errors import StepError
from tests.training.pipelines import assert_alike, on_stages

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


class Network(nn.Module):
    kind: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        memory = Memory()
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x + memory.sum())


class Hooked(Network):
    """Collects by hooks of submodules that are given the memory too."""

    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self.collected.append(output.square())

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        for block in self.blocks:
            block.attention.register_forward_hook(self.collect, with_kwargs=True)

    def forward(self, x: Tensor) -> Tensor:
        self.collected = []
        return super().forward(x) + torch.stack(self.collected).mean(0)


class HookedOnMemory(Hooked):
    def collect(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        layers = kwargs["memory"].layers
        self.collected.append(layers[-1].keys.mean() if layers else output.mean())


class ReturnsMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        return super().forward(x, memory), memory


class Handed(Network):
    """Each block returns the memory that it is given, and the next is given what it returns."""

    kind = ReturnsMemory

    def forward(self, x: Tensor) -> Tensor:
        first = memory = Memory()
        for block in self.blocks:
            x, memory = block(x, memory)
            assert memory is first
        return self.head(x + memory.sum())


class ReturnsNewMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        new = Memory()
        new.add(super().forward(x, new))
        return x, new


class NewMemories(Handed):
    kind = ReturnsNewMemory

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, memory = block(x, Memory())
        return self.head(x + memory.sum())


class Queues(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        x = super().forward(x, memory)
        memory.layers[-1].last = deque([x])
        return x


class Queued(Network):
    kind = Queues


class KeepsMemory(Block):
    def forward(self, x: Tensor, memory: Memory) -> Any:
        self.seen = [x.mean(-1, keepdim=True), Memory()]
        self.seen[1].add(x)
        return super().forward(x, memory)


class Kept(Network):
    """Uses what blocks keep beside an object that holds tensors."""

    kind = KeepsMemory

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.seen[0] for block in self.blocks)


class KeptAndUsed(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(block.seen[1].sum().mean() for block in self.blocks)


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(root.net(x), x.roll(1, -1))


def batches() -> Sequence[Tensor]:
    return torch.randn(4, 2, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()


def seeded(network: type[Network]) -> nn.Module:
    torch.manual_seed(1)
    return network()


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("network", [Hooked, Handed, Kept])
def test_objects_are_as_in_one_process(network: type[Network], stages: int) -> None:
    assert_alike(partial(seeded, network), loss, batches(), stages)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (HookedOnMemory, "uses a Memory of what net.blocks.1.attention computes, on an earlier stage"),
        (KeptAndUsed, "uses a Memory of what net.blocks.0 keeps as seen, on an earlier stage"),
        (NewMemories, "net.blocks.0 returns a Memory, which can't be sent to another pipeline stage"),
        (Queued, "leaves a deque in what it is given"),
    ],
)
def test_what_would_be_the_first_microbatchs_is_refused(network: type[Network], said: str) -> None:
    with pytest.raises(StepError, match=re.escape(said)):
        on_stages(partial(seeded, network), loss, batches(), 2)
