"""Views of what crosses, and what hooks keep, changed in place: as in one process, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from tests.training.pipeline.test_crossing import WIDTH, Block, Net, batches, loss, seeded
from tests.training.pipelines import alone, assert_alike, on_stages


class KeepsViews(Net):
    """Of each state; ``change`` is what it does to the state then."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, firsts = self.embed(x), []
        for block in self.blocks:
            hidden = block(hidden)
            firsts.append(hidden[:, :1])
            hidden = self.change(hidden)
        return self.leave(hidden + sum(firsts))

    def change(self, hidden: Tensor) -> Tensor:
        return hidden + 1


class AddsToAll(KeepsViews):
    def change(self, hidden: Tensor) -> Tensor:
        hidden += 1
        return hidden


class ChangesView(Net):
    """And uses what it is of."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
            hidden.view(-1, WIDTH).mul_(0.5)
        return self.leave(hidden)


class Between(Net):
    """A middle stage changes one of two that came from the first."""

    def forward(self, x: Tensor) -> Tensor:
        state = self.blocks[0](self.embed(x))
        first = state[:, :1]
        hidden = self.blocks[1](state * 1)  # which its backward needs
        state.mul_(0.5)
        return self.leave(self.blocks[3](self.blocks[2](hidden)) + first + state)


class WithView(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Any:
        result = super().forward(x)
        return result, result[:, :1]


class ReturnsViews(Net):
    block = WithView

    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.embed(x), 0.0
        for block in self.blocks:
            hidden, first = block(hidden)
            total = total + self.change(first)
        return self.leave(hidden + total)

    def change(self, first: Tensor) -> Tensor:
        return first * 0.5


class ChangesReturnedView(ReturnsViews):
    def change(self, first: Tensor) -> Tensor:
        return first.mul_(0.5)


class InPlaceBlock(Block):
    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return x.add_(super().forward(x.clone()))


class ViewOfWritten(Net):
    """Blocks write to their argument, of which the network keeps a view."""

    block = InPlaceBlock

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * 1
        first = hidden[:, :1]
        for block in self.blocks:
            block(hidden)
        return self.leave(hidden + first)


class Activated(Block):
    """In place, as convolutional networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.activate = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        return super().forward(x) + self.down(self.activate(self.up(x)))


class HooksActivated(Net):
    """A hook keeps what an activation changes then, or what it returns."""

    block = Activated

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.get_submodule(layer).register_forward_hook(lambda module, inputs, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.clear()
        return super().forward(x) * sum(each.mean() for each in self.seen)


class Halves(Net):
    """Parts of one tensor, of which one is changed: they share a memory, and no element."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
            left, right = hidden[..., : WIDTH // 2], hidden[..., WIDTH // 2 :]
            hidden = torch.cat([right * 0.5, left], -1)
        return self.leave(hidden)


AFTERWARDS, BEFORE = (partial(HooksActivated, layer) for layer in ("activate", "up"))


@pytest.mark.parametrize("network", [KeepsViews, ChangesView, ViewOfWritten, ReturnsViews, AFTERWARDS, Halves])
def test_what_shares_memory_and_stays_as_it_is_crosses(network: type[Net]) -> None:
    assert_alike(seeded(network), loss, batches(), 3)


@pytest.mark.parametrize("network", [AddsToAll, Between, ChangesReturnedView, BEFORE])
def test_what_shares_memory_and_is_changed_is_refused(network: type[Net]) -> None:
    assert alone(seeded(network), loss, batches()).gradients  # one process may do so
    with pytest.raises(StepError, match="shares its memory with a tensor that the step changes in place"):
        on_stages(seeded(network), loss, batches(), 3)
