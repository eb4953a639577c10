"""Parts around the blocks run on the stage that holds them, and elsewhere as often as it takes to know their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.training.pipeline.test_crossing import WIDTH, Net, seeded
from tests.training.pipelines import assert_alike

PIECES = 6
RAN: list[nn.Module] = []  # the modules themselves: the id of one that is gone may be another's
note_run = RAN.append  # what the code of a network names itself is its state, and would be put back


class Layer(nn.Module):
    """Counts its forwards, by instance: each stage has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        note_run(self)
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


class Towers(Net):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.embed = tower  # type: ignore[assignment]


class Skips(Towers):
    """The tower's output is used after the blocks too: it crosses."""

    def forward(self, x: Tensor) -> Tensor:
        sizes: list[int] = []
        seen = self.embed(x, sizes) if isinstance(self.embed, Collects) else self.embed(x)
        return self.leave(self.through(seen) * seen) * getattr(self.embed, "sizes", 1) * (1 + sum(sizes))


def loss(root: nn.Module, x: Tensor) -> Tensor:
    return root.net(x).square().mean()


PARTS = torch.randn(4, 2, 5, PIECES, generator=torch.Generator().manual_seed(1)).unbind()


def ran_elsewhere(make: Callable[[], nn.Module]) -> list[int]:
    """How often the tower's layer ran on each stage but the first."""

    RAN.clear()
    assert_alike(seeded(make), loss, PARTS, 3)
    often = sorted(Counter(RAN).values())  # also of the network alone
    assert often[-1] >= len(PARTS)
    return often[:2]


@pytest.mark.parametrize("net", [Towers, Skips])
def test_a_tower_runs_where_it_is(net: type[Towers]) -> None:
    # elsewhere only in the first microbatch, and twice in the rehearsal after the batch
    assert ran_elsewhere(lambda: net(Tower())) == [3, 3]


@pytest.mark.parametrize("tower", [Keeps, Draws, Collects])
def test_a_part_that_does_more_than_return_something_runs_everywhere(tower: Callable[[], nn.Module]) -> None:
    assert min(ran_elsewhere(lambda: Skips(tower()))) >= len(PARTS)
