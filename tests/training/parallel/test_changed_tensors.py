"""Tensors that units of FSDP2's change in place: autograd would refuse that of the views that FSDP2 gives them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.training.parallel.test_arguments_of_units import alone, assert_step_alike, sharded
from tests.training.pipeline.test_crossing import Block, Net, batches

__all__ = ["alone"]  # a fixture of all tests here


class BeginsWithReLU(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(F.relu(x, inplace=True))


class Adds(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(x * 1)
        return x


class InPlace(Net):
    kind: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class InPlaceReLU(InPlace):
    kind = BeginsWithReLU


class InPlaceSum(InPlace):
    kind = Adds


class UsesWhatItGave(InPlaceSum):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            given = hidden * 1
            hidden = block(given) + given
        return self.head(self.norm(hidden))


class Flow(Block):
    def forward(self, x: Tensor, state: list[Tensor]) -> Tensor:  # type: ignore[override]
        moved = super().forward(x)
        state[0] += moved.tanh().sum(-1)
        return moved


class Flows(InPlace):
    """A sum that no block returns, in a list."""

    kind = Flow

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        state = [torch.zeros(hidden.shape[:-1])]
        for block in self.blocks:
            hidden = block(hidden, state)
        return self.head(self.norm(hidden)) * state[0].unsqueeze(-1)


def test_what_is_saved_for_backwards_is_still_guarded() -> None:
    class Saves(InPlaceSum):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x).exp()  # which its backward needs
            for block in self.blocks:
                hidden = block(hidden)
            return self.head(self.norm(hidden))

    root, _ = sharded(Saves)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        root(batches()[0]).backward()


class AddsLater(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        if self.calls > 1:
            x += 1
        return super().forward(x * 1)


class ChangesLater(InPlace):
    kind = AddsLater


class OfTwo(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(other * 1)
        return x


class GivesAView(InPlace):
    kind = OfTwo

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, hidden.view_as(hidden))
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("network", [InPlaceReLU, UsesWhatItGave, Flows, ChangesLater, GivesAView])
def test_changes_in_place_are_the_callers(network: type[Net]) -> None:
    root, plain = sharded(network)
    for x in batches():
        assert_step_alike(root, plain, x)
