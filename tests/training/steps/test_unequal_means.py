"""Which losses are told of as means over another number in each part of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.plugin.steps.checks.unequal_means import UnequalMeans


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("loss_of", "told"),
    [
        (lambda x, part: x.sum() / (3 + part), 1),
        (lambda x, part: x.sum() / -(3 + part), 1),
        (lambda x, part: x.sum() / -3, 0),
        (lambda x, part: x.sum() / 0 if part else x.sum() / 2, 1),
        (lambda x, part: x.sum() / 0, 0),
        (lambda x, part: x.sum(), 0),
        (lambda x, part: (x * (1 - part)).sum() / torch.tensor(float(1 - part)).clamp(min=1), 1),
        (lambda x, part: x.sum() * 0 if part else x.sum() / torch.tensor(2.0), 1),
        (lambda x, part: torch.nan_to_num(x.sum() * (1 - part) / (1 - part)), 1),
        (lambda x, part: (x * 0).sum() / torch.tensor(1.0), 0),
        (lambda x, part: (x * part)[:1].mean(), 0),
        (lambda x, part: (x[:1] / torch.tensor([3.0 + part])).mean(), 0),
    ],
    ids=[
        *("unequal", "unequal and negative", "equal and negative", "one over nothing", "all over nothing", "none"),
        *("guarded divisor", "guarded loss", "guarded result", "all are 0", "one element that is 0"),
        "what one sample is divided by",
    ],
)
def test_unequal_numbers_are_told_of_once(
    group: dist.ProcessGroup, loss_of: Callable[[Tensor, int], Tensor], told: int
) -> None:
    means = UnequalMeans(2, group, is_weighted=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for part in range(2):
                means.note(loss_of(torch.ones(4, requires_grad=True), part))
            means.warn()
    assert len([each for each in said if "mean over a different number" in str(each.message)]) == told


def test_padding_that_begins_later_is_found_in_the_next_step_that_is_looked_at(group: dist.ProcessGroup) -> None:
    means = UnequalMeans(2, group, is_weighted=False)
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 70):
            for part in range(2):
                means.note(torch.ones(4, requires_grad=True).sum() / (3 + part * (step > 20)))
            if means.warn():
                told.append(step)
    assert told == [32]
