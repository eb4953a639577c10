"""What ranks exchange after each step: numbers, of which the largest in each place is every rank's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.layout import Layout
from lightning_shard.plugin.steps.checks.agreement import SameGradients, SameSettings


def optimizer(lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=lr)


def largest(*numbers: list[int]) -> list[int]:
    return [max(of_ranks) for of_ranks in zip(*numbers, strict=True)]


def test_optimizers_with_other_settings_on_a_rank_are_refused() -> None:
    """A scheduler that monitors a data rank's own value lowered the rate of that rank's shards only."""
    ranks = [SameSettings([optimizer(lr)], Layout.resolve(3, 0)) for lr in (1e-3, 1e-3, 1e-4)]
    ranks[0].check(largest(ranks[0].numbers, ranks[1].numbers))
    for rank in ranks:
        with pytest.raises(StepError, match=r"different settings \(this rank's learning rates: .*sync_dist=True"):
            rank.check(largest(*(each.numbers for each in ranks)))


def test_gradients_of_other_parameters_on_a_data_rank_are_refused_and_on_a_stage_not() -> None:
    module = nn.Linear(2, 2)
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
    none = SameGradients(module, Layout.resolve(4, 0, **sizes))
    module.bias.grad = torch.ones(2)
    neighbour = SameGradients(module, Layout.resolve(4, 1, **sizes))
    other_stage = SameGradients(module, Layout.resolve(4, 2, **sizes))
    none.check(largest(none.numbers, other_stage.numbers))
    with pytest.raises(StepError, match=r"gradients of different .*on this rank \['weight', 'bias'\] have none"):
        none.check(largest(none.numbers, neighbour.numbers))
    module.weight.grad = torch.ones(2, 2)
    both = SameGradients(module, Layout.resolve(4, 1, **sizes))
    with pytest.raises(StepError, match=r"gradients of different .*on another rank some have none"):
        both.check(largest(both.numbers, none.numbers))
