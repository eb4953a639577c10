"""Losses of microbatches, and of their samples together."""

import warnings
from typing import Any

import pytest
import torch

from lightning_shard.plugin.steps.composed import _joined, tell_of_loss


def told(losses: list[float], together: float, weights: Any = (1.0, 1.0)) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_loss(losses, weights, together, 4, in_32_bits=True)
    return [str(warning.message) for warning in caught]


def test_a_mean_over_samples_isnt_told_of() -> None:
    assert told([1.0, 2.0], 1.5) == told([1.0, 2.0], 1.5001) == []
    assert told([1.0, 2.0], 1.75, (1.0, 3.0)) == [], "weighted"
    assert told([0.0, 0.0], 0.0, (0.0, 0.0)) == []


@pytest.mark.parametrize("together", [3.0, 1.75, 1.49])
def test_another_loss_is(together: float) -> None:
    [said] = told([1.0, 2.0], together)
    assert f"is {together:.5g}, and the mean of each one's 1.5" in said
    assert "loss_weight" in said


def test_values_that_came_are_joined_where_it_is_clear_how() -> None:
    state, table, weight = ("block", 0), ("operation", 3), ("parameter", "w")
    first = {state: torch.ones(2, 3), table: torch.ones(5, 3), weight: torch.ones(2)}
    second = {state: torch.zeros(2, 3), table: torch.ones(5, 3), weight: torch.ones(2)}
    joined: Any = _joined([first, second], 2)  # type: ignore[list-item]
    assert torch.equal(joined[state], torch.cat([first[state], second[state]]))
    assert joined[table].shape == (5, 3)
    assert joined[weight].shape == (2,)
    assert _joined([first, {**second, table: torch.zeros(5, 3)}], 2) is None  # type: ignore[list-item]
