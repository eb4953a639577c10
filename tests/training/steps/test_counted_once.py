"""Which tensors of a total norm are of a weight that another stage counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.clip import count_elsewhere
from lightning_shard.plugin.steps.gradient_norms import counted_once

TIED = "embedding.weight"


def stage() -> dict[str, Tensor]:
    """Parameters with gradients, one of them tied; the output's weight has the same shape."""
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(8, 6), "inner": nn.Linear(6, 6), "output": nn.Linear(6, 8)}
    named: dict[str, Tensor] = dict(nn.ModuleDict(layers).named_parameters())
    count_elsewhere(named[TIED])
    for parameter in named.values():
        parameter.grad = torch.randn_like(parameter)
    return named


def counted(named: dict[str, Tensor], given: list[Tensor]) -> list[int]:
    """The indices of the tensors that count."""
    found = {id(tensor) for tensor in counted_once(given, named)}
    return [i for i, tensor in enumerate(given) if id(tensor) in found]


@pytest.mark.parametrize("made", [lambda p: p.grad, lambda p: p])
def test_each_gradient_and_each_weight_counts_once(made: Callable[[Any], Tensor]) -> None:
    named = stage()
    left_out = list(named).index(TIED)
    everyone = [made(p) for p in named.values()]
    assert counted(named, everyone) == [i for i in range(len(named)) if i != left_out]


def test_some_gradients_count_in_any_order() -> None:
    named = stage()
    given = [cast(Tensor, named[name].grad) for name in ("output.weight", TIED, "inner.bias")]
    assert counted(named, given) == [0, 2]
    assert counted(named, given[::2]) == [0, 1]


@pytest.mark.parametrize("made", [lambda p: p.grad / 7, lambda p: p.grad.half(), lambda p: p.grad.norm()])
def test_what_may_be_computed_from_a_tied_weight_is_refused(made: Callable[[Any], Tensor]) -> None:
    named = stage()
    said = r"tensors that are no parameters' gradients.* from that of embedding\.weight, .*pass the gradients"
    for names in ((TIED, "inner.bias"), named):
        with pytest.raises(StepError, match=said):
            counted(named, [made(named[name]) for name in names])
