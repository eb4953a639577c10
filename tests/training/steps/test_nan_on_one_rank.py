"""A value that is NaN or infinite on one rank only differs from the others'; one that is so on all doesn't."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_shard.parallel.block_probe import Result, are_alike
from lightning_shard.parallel.rank_compare import differing, fingerprints

SPOILED = [math.nan, math.inf]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_numbers_of_ranks(spoiled: float) -> None:
    """A NaN on one rank beside other differences hides none of them."""
    ranks = {
        "on one": [((), spoiled, 1.0), ((), 1.0, 1.0)],
        "on all": [((), spoiled, 1.0), ((), spoiled, 1.0)],
        "another number": [((), 1.0, 1.0), ((), 1.0, 2.0)],
        "alike": [((), 1.0, -1.0), ((), 1.0, -1.0 - 1e-7)],
    }
    found = {name: dict(enumerate(of_ranks)) for name, of_ranks in ranks.items()}
    assert differing(found, 0.01, noise=1e-6) == ["on one", "another number"]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_tensors_of_ranks(spoiled: float) -> None:
    values = torch.arange(6.0)
    one, other, third = values.clone(), values.clone(), values.clone()
    one[2] = other[2] = spoiled
    pairs = {"equal": (values, third), "on both": (one, other), "here": (one, values), "there": (values, one)}
    found = {name: fingerprints(dict(enumerate(pair))) for name, pair in pairs.items()}
    assert differing(found, 1e-6) == ["here", "there"]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_outputs_of_blocks(spoiled: float) -> None:
    whole, split, other = torch.ones(3), torch.ones(3), torch.ones(3)
    split[0] = spoiled
    other[1] = 2.0
    assert not are_alike(Result("", split), Result("", whole), 0.02)
    # where the whole block gives no number, nothing is compared
    assert are_alike(Result("", whole), Result("", split, whole), 0.02)
    assert not are_alike(Result("", other), Result("", split), 0.02)
