"""Which weights of a block are gathered in autocast's type: those of which the code does nothing but multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.parallel.fsdp.autocast import cast_units, not_cast

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class InWholeBits(Block):
    """Crashed: the layer that has its float32 input was gathered in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.up(self.norm(x.float()))
        return x + self.down(y)


class ByAFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + in_whole_bits(x, self.up)


def in_whole_bits(x: Tensor, layer: nn.Linear) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), layer.weight.float())


class Penalized(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.up.weight.square().mean())


class WithTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions[: x.size(1)])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)


class LossesInWholeBits(Block):
    """Activations only."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return y.float().softmax(-1)


class Scaling(nn.Module):
    """A layer of one's own: whatever it does with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[: x.size(1)]


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)


class With(Block):
    def __init__(self, kind: type[nn.Module], count: int = 1) -> None:
        super().__init__()
        self.more = nn.Sequential(*(kind() for _ in range(count)))


class Network(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block, Block()])
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.autocast("cpu", enabled=False):
            return self.last(x.float())


def is_cast(block: nn.Module) -> bool:
    return bool(cast_units(Network(block), [block]))


@pytest.mark.parametrize("block", [Block(), LossesInWholeBits(), nn.TransformerEncoderLayer(WIDTH, 2), With(Linear)])
def test_what_is_only_multiplied_is_cast(block: nn.Module) -> None:
    assert is_cast(block)


@pytest.mark.parametrize("make", [InWholeBits, ByAFunction, Penalized, WithTable, Recurrent, Scaling])
def test_what_may_need_all_its_bits_is_not(make: Any) -> None:
    assert not is_cast(make())


def test_a_small_matrix_of_a_block_is_left_alone_and_a_large_one_leaves_its_block_alone() -> None:
    assert not is_cast(With(Scaling))
    block = With(Linear, 30)
    block.more.append(Scaling())
    assert is_cast(block)
    alone = {name for name, p in block.named_parameters() if p in not_cast(block)}
    assert alone == {"norm.weight", "norm.bias", "more.30.weight"}


def test_what_is_called_without_autocast_is_not_cast() -> None:
    network = Network(Block())
    assert cast_units(network, [*network.blocks, network.last]) == {*network.blocks}
