"""Tensors that units of FSDP2's change in place, which autograd refuses of the views that they are given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.errors import StepError
from tests.unit.test_crossing import Block, Net, batches
from tests.unit.test_mutable_arguments import alone, assert_step_alike, sharded

__all__ = ["alone"]  # a fixture of all tests here


class BeginsWithReLU(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(F.relu(x, inplace=True))


class Adds(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(x * 1)
        return x


class WritesToPart(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x[..., ::2] += super().forward(x * 1)[..., ::2]
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


class InPlaceParts(InPlace):
    kind = WritesToPart


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


@pytest.mark.parametrize("network", [InPlaceReLU, InPlaceSum, InPlaceParts, UsesWhatItGave, Flows])
def test_changes_in_place_are_the_callers(network: type[Net]) -> None:
    root, plain = sharded(network)
    for x in batches():
        assert_step_alike(root, plain, x)


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


def test_a_block_that_begins_to_change_its_argument_in_a_later_call_is_named() -> None:
    root, _ = sharded(ChangesLater)
    root(batches()[0])
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace") as raised:
        root(batches()[1])
    [note] = raised.value.__notes__
    assert note.startswith("A AddsLater changes an argument in place here, and changed none in its first call")


class OfTwo(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(other)
        return x


class GivesAView(InPlace):
    kind = OfTwo

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, hidden.view_as(hidden))
        return self.head(self.norm(hidden))


def test_a_change_that_another_argument_shares_is_refused() -> None:
    root, _ = sharded(GivesAView)
    with pytest.raises(StepError, match="A OfTwo changes an argument in place that shares its memory with another one"):
        root(batches()[0])


def test_units_that_change_nothing_get_what_fsdp2_hands_them() -> None:
    root, _ = sharded(InPlace)
    seen: list[str] = []
    for block in root.net.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda _, args: seen.append(type(args[0].grad_fn).__name__))  # type: ignore[union-attr]
    for x in batches()[:2]:
        root(x)
    assert seen == ["_AliasBackward"] * 4 + ["RegisterPostBackwardFunctionBackward"] * 4
