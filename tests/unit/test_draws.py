"""Which operations draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_shard.pipeline.dataflow.draws import NotesDraws

X = torch.randn(2, 2, 4, 8)
DRAWS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "dropout": (lambda: F.dropout(X, 0.1), True),
    "dropout of 0": (lambda: F.dropout(X, 0.0), False),
    "attention": (lambda: F.scaled_dot_product_attention(X, X, X, is_causal=True), False),
    "attention with dropout": (lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.1), True),
    "an order": (lambda: torch.randperm(3), True),
    "a sum": (X.sum, False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_random_numbers_is_noted(name: str) -> None:
    run, draws = DRAWS[name]
    with NotesDraws() as notes:
        run()
    assert notes.has_drawn is draws
