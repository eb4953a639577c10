"""Parts around the blocks run on the stage that holds them, and elsewhere as often as it takes to know their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.training.pipelines import assert_alike

WIDTH, PIECES = 8, 6
RAN: list[int] = []
note_run = RAN.append  # what the code of a network names itself is its state, and would be put back


class Layer(nn.Module):
    """Counts its forwards, by instance: each stage has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        note_run(id(self))
        return x + self.inner(x).relu()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PIECES, WIDTH)
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.patches(x))


class Keeps(Tower):
    """Leaves something beside its output, which code after the blocks uses."""

    def forward(self, x: Tensor) -> Tensor:
        self.sizes = x.new_full((), x.size(1))
        return super().forward(x)


class Collects(Tower):
    """Adds to a list that it is given."""

    def forward(self, x: Tensor, sizes: list[int] | None = None) -> Tensor:
        if sizes is not None:
            sizes.append(x.size(1))
        return super().forward(x)


class Draws(Tower):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(())  # code after it, on all stages, draws the next
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tower(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Skips(Net):
    """The tower's output is used after the blocks too: it crosses."""

    def forward(self, x: Tensor) -> Tensor:
        sizes: list[int] = []
        hidden = seen = self.tower(x, sizes) if isinstance(self.tower, Collects) else self.tower(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden * seen) * getattr(self.tower, "sizes", 1) * (1 + sum(sizes))


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return root.net(x).square().mean()


PARTS = torch.randn(4, 2, 5, PIECES, generator=torch.Generator().manual_seed(1)).unbind()


def ran_elsewhere(make: Callable[[], nn.Module]) -> list[int]:
    """How often the tower's layer ran on each stage but the first."""

    def made() -> nn.Module:
        torch.manual_seed(1)
        return make()

    RAN.clear()
    assert_alike(made, loss, PARTS, 3)
    often = sorted(Counter(RAN).values())  # also of the network alone
    assert often[-1] >= len(PARTS)
    return often[:2]


@pytest.mark.parametrize("net", [Net, Skips])
def test_a_tower_runs_where_it_is(net: type[Net]) -> None:
    # elsewhere only in the first microbatch, and twice in the rehearsal after the batch
    assert ran_elsewhere(lambda: net(Tower())) == [3, 3]


@pytest.mark.parametrize("tower", [Keeps, Draws, Collects])
def test_a_part_that_does_more_than_return_something_runs_everywhere(tower: Callable[[], nn.Module]) -> None:
    assert min(ran_elsewhere(lambda: Skips(tower()))) >= len(PARTS)
