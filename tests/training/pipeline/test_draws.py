"""Random numbers that don't depend on how many samples are computed at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_shard.pipeline.dataflow.draws import DrawsByRow

X = torch.linspace(0.1, 0.9, 2 * 3 * 4 * 8).reshape(2, 3, 4, 8)
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "of features": lambda x: F.dropout2d(x, 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "noise": lambda x: x + torch.randn_like(x),
    "noise of a size": lambda x: x + torch.rand(x.shape),
    "a time for each": lambda x: x * torch.randint(0, 100, (len(x),)).view(-1, 1, 1, 1),
    "one for all": lambda x: x * torch.rand(()) + torch.normal(0.0, 1.0, (8,)),
    "gumbel": F.gumbel_softmax,
    "a path": lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5),
    "by probabilities": torch.bernoulli,
    "rows of all samples": lambda x: F.dropout(torch.cat([x, -x]).flatten(0, 1), 0.5).view(2, len(x), 3, 4, 8)[1],
    "samples last": lambda x: F.dropout(x.flatten(1).T, 0.5).T.reshape(x.shape),
    "samples second": lambda x: F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_is_drawn_for_alike_whichever_samples_are_computed_with_it(name: str) -> None:
    def drawn(x: Tensor) -> Tensor:
        torch.manual_seed(4)
        with DrawsByRow(1) as draws:
            result = DRAWS[name](x)
        assert not draws.is_blind
        return result

    torch.testing.assert_close(drawn(X), torch.cat([drawn(X[:1]), drawn(X[1:])]))


def test_dropout_still_drops_some_and_scales_the_rest() -> None:
    with DrawsByRow(1):
        found = F.dropout(torch.ones(2, 1000), 0.25)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("draw", "is_blind"),
    [(lambda: torch.multinomial(X[0, 0], 1), True), (lambda: torch.randperm(3), False), (X.sum, False)],
    ids=["of weights", "an order", "nothing"],
)
def test_what_is_drawn_in_another_way_is_noted(draw: Callable[[], Tensor], is_blind: bool) -> None:
    with DrawsByRow(1) as draws:
        draw()
    assert draws.is_blind is is_blind
