"""A value that is NaN or infinite on one rank only differs from the others'; one that is so on all doesn't."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_shard.parallel.tensor.check_blocks import are_alike as outputs_are_alike
from lightning_shard.plugin.steps.checks.fingerprints import are_alike, outline
from lightning_shard.plugin.steps.checks.tensor_ranks import differ, losses_differ

SPOILED = [math.nan, math.inf]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_gradients_and_buffers(spoiled: float) -> None:
    ranks = torch.ones(2, 4, 2, dtype=torch.float64)
    ranks[0, 0, 0] = spoiled  # on one rank
    ranks[:, 1] = spoiled  # on all
    ranks[1, 2, 1] = 2.0  # another number: seen beside the others
    assert differ(ranks, 0.01, 1e-6).tolist() == [True, False, True, False]


@pytest.mark.parametrize("spoiled", SPOILED)
def test_losses(spoiled: float) -> None:
    for losses, expected in {(1.0, spoiled): True, (spoiled, 1.0): True, (spoiled, spoiled): False}.items():
        assert losses_differ(torch.tensor(losses), in_32_bits=True) is expected
    assert losses_differ(torch.tensor([1.0, 1.1]), in_32_bits=True)
    assert not losses_differ(torch.tensor([-1.0, -1.0 - 1e-7]), in_32_bits=True)


@pytest.mark.parametrize("spoiled", SPOILED)
def test_outlines(spoiled: float) -> None:
    values = torch.arange(6.0)
    one, other, third = values.clone(), values.clone(), values.clone()
    one[2] = other[2] = spoiled
    assert are_alike(outline(values), outline(third), 1e-6)
    assert are_alike(outline(one), outline(other), 1e-6)
    assert not are_alike(outline(one), outline(values), 1e-6)
    assert not are_alike(outline(values), outline(one), 1e-6)


@pytest.mark.parametrize("spoiled", SPOILED)
def test_outputs_of_blocks(spoiled: float) -> None:
    whole, split, other = torch.ones(3), torch.ones(3), torch.ones(3)
    split[0] = spoiled
    other[1] = 2.0
    assert not outputs_are_alike(split, whole, None)
    assert outputs_are_alike(whole, split, whole)  # where the whole block gives no number, nothing is compared
    assert not outputs_are_alike(other, split, None)
