"""Selective activation checkpointing of blocks that change what is kept in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.activation_checkpointing import recompute

WIDTH = 8


class Scores(nn.Module):
    """Attention by hand, which scales and masks its scores in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        scores *= WIDTH**-0.5
        scores.masked_fill_(torch.ones(len(x[0]), len(x[0])).triu(1).bool(), -1e4)
        return x + scores.softmax(-1) @ v


class Adds(nn.Module):
    """Writes to what its layer returned, by an index and by ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden += x
        hidden = torch.sin(hidden)
        hidden = self.layer(hidden)
        hidden[hidden < 0] = 0
        return hidden * hidden


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0]


def gated(x: Tensor, layers: nn.ModuleList) -> Tensor:
    return x + F.silu(layers[0](x), inplace=True) * layers[1](x)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return gated(x, self.layers)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scores": Scores,
    "adds": Adds,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gated": Gated,
}


def gradients(make: Callable[[], nn.Module], *, selective: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    block = make()
    if selective:
        recompute(block, lambda: lambda: None, selective=True)
    x = torch.randn(2, 5, WIDTH)
    for _ in range(2):  # accumulated
        hidden = block(x)
        hidden *= 2  # changed by the code around it
        hidden.square().sum().backward()
    return {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_are_changed_in_place_are_kept_as_they_were(kind: str) -> None:
    expected, found = (gradients(KINDS[kind], selective=selective) for selective in (False, True))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


class Leaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layer(x)
        return self.seen.tanh()


def test_a_result_that_is_changed_after_the_block_and_a_second_backward_are_refused() -> None:
    block, x = Leaks(), torch.randn(2, WIDTH)
    recompute(block, lambda: lambda: None, selective=True)
    loss = block(x).sum()
    with torch.no_grad():
        block.seen.zero_()
    with pytest.raises(StepError, match="was changed in place after the block had returned"):
        loss.backward()
    loss = block(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match="second backward"):
        loss.backward()


def test_operations_on_lists_whose_gradients_torch_loses_are_refused() -> None:
    class Lists(Gated):
        def forward(self, x: Tensor) -> Tensor:
            products = [layer(x) for layer in self.layers]
            torch._foreach_mul_(products, 0.5)
            return products[0] * products[1]

    block = Lists()
    recompute(block, lambda: lambda: None, selective=True)
    with pytest.raises(StepError, match="on tensors that need gradients"):
        block(torch.randn(2, WIDTH))


def test_gradients_that_are_taken_twice_are_refused() -> None:
    """Also of a block that has several products: torch ends the second run before the last of them."""
    block, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), torch.randn(2, WIDTH)
    recompute(block, lambda: lambda: None, selective=True)
    x.requires_grad_()
    out = block(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(StepError, match="gradients taken twice"):
        (out.square().mean() + gradient.square().mean()).backward()
