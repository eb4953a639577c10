"""Which losses are taken for sums over samples, and warned of on stages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.pipeline.dataflow.mixed_samples import LossOf
from lightning_shard.plugin.steps.checks.summed_losses import SummedLosses, is_sum_over_samples, warn_of_balancing

SAMPLES = 6
TARGETS = torch.arange(SAMPLES) % 3
WEIGHTS = nn.Parameter(torch.ones(SAMPLES, 3))


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: x.sum(),
        lambda x: F.cross_entropy(x, TARGETS, reduction="sum"),
        lambda x: F.mse_loss(x, x.detach() + 1, reduction="sum"),
        lambda x: F.cross_entropy(x, TARGETS, reduction="none").sum(),
        lambda x: x.mean() + x.square().sum(),
        lambda x: (x - x.mean(0)).square().sum(),
        lambda x: x.mean(-1).sum(),
    ],
)
def test_sums_over_samples_are_seen(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert is_sum_over_samples(loss_of(torch.ones(SAMPLES, 3, requires_grad=True) * 1), SAMPLES)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x: x.mean(),
        lambda x: x.sum() / SAMPLES,
        lambda x: x.sum() * (1 / SAMPLES),
        lambda x: x.sum(-1).mean(),
        lambda x: F.cross_entropy(x, TARGETS),
        lambda x: torch.stack([x.mean(), x.square().mean()] * SAMPLES).sum(),
        lambda x: (torch.stack([x.mean()] * SAMPLES) * x[:, 0].detach().exp().requires_grad_() + 1).sum(),
        lambda x: x.repeat(1, 2).square().mean(0).sum(),  # over as many features as samples
        lambda x: (x.repeat(1, 4).mean(-2) * 2).exp().sum(),
        lambda x: F.kl_div(x, x.detach(), reduction="batchmean"),
        lambda x: x.mean() + (1e-3 * WEIGHTS.abs()).sum() + WEIGHTS.sigmoid().square().sum(),
    ],
)
def test_means_and_scaled_sums_are_not(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert not is_sum_over_samples(loss_of(torch.ones(SAMPLES, 3, requires_grad=True) * 1), SAMPLES)


def told(looks: SummedLosses, found: LossOf | None, loss: Tensor) -> bool:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        looks.note(loss, SAMPLES)
        assert looks.end_step(found) == bool(said)
    return any("is a sum over samples" in str(each.message) and "1/4 of those" in str(each.message) for each in said)


def test_a_sum_is_warned_of_once_and_only_in_several_microbatches() -> None:
    loss = torch.ones(SAMPLES, requires_grad=True).mul(1).sum()
    looks = SummedLosses(4)
    assert [told(looks, None, loss) for _ in range(3)] == [True, False, False]
    assert not told(SummedLosses(1), None, loss)


@pytest.mark.parametrize(
    ("found", "of_sum", "of_mean"),
    [
        (LossOf.SUM, True, True),
        (LossOf.MEAN, False, False),
        (LossOf.MIXED, False, False),
        (LossOf.NEITHER, True, False),
        (None, True, False),
    ],
)
def test_what_is_known_of_a_loss_counts_more_than_its_graph(found: LossOf | None, of_sum: bool, of_mean: bool) -> None:
    losses = torch.ones(SAMPLES, requires_grad=True).mul(1)
    assert told(SummedLosses(4), found, losses.sum()) == of_sum
    assert told(SummedLosses(4), found, losses.mean()) == of_mean


def test_balanced_experts_are_warned_of_where_a_batch_has_parts() -> None:
    module = nn.Module()
    module.config = SimpleNamespace(output_router_logits=True)
    warn_of_balancing(module, 1)
    with pytest.warns(UserWarning, match="balances its experts .*each of the 4 parts"):
        warn_of_balancing(module, 4)
