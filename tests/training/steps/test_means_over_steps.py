"""Means over steps count batches alike, into however many microbatches each is split."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_shard.plugin.steps.means_over_steps import MeansOverSteps, UnevenLists
from lightning_shard.state.patch import Change, Outline, change_since


@pytest.fixture
def means() -> MeansOverSteps:
    return MeansOverSteps()


def weighed(means: MeansOverSteps) -> MeanMetric:
    metric = MeanMetric()
    metric.__dict__["update"] = means.weighing(metric.update)
    return metric


def run(means: MeansOverSteps, metric: MeanMetric, batches: list[list[float]]) -> float:
    """Batches of the losses of their microbatches; whole ones have four."""
    for losses in batches:
        with means.batch(len(losses), 4):
            for loss in losses:
                means.begin_microbatch(2)
                metric(torch.tensor(loss))
    return float(metric.compute())


def test_a_batch_of_fewer_microbatches_counts_as_much(means: MeansOverSteps) -> None:
    assert run(means, weighed(means), [[1.0, 2.0, 3.0, 4.0], [7.5]]) == 5.0
    assert run(means, weighed(means), [[2.0], [1.0, 3.0, 5.0], [1.0, 1.0, 1.0, 1.0]]) == pytest.approx(2.0)


def test_what_is_given_a_weight_or_is_a_vector_counts_as_it_is(means: MeansOverSteps) -> None:
    metric = weighed(means)
    with means.batch(1, 4):
        means.begin_microbatch(2)
        metric.update(2.0, weight=3)
        means.begin_microbatch(2)
        metric.update(torch.tensor([6.0]), weight=torch.tensor([1.0]))
    assert float(metric.compute()) == 3.0
    metric = weighed(means)
    with means.batch(1, 4):
        means.begin_microbatch(2)
        metric.update(torch.tensor([1.0, 2.0]))
    assert (float(metric.mean_value), float(metric.weight)) == (3.0, 2.0)


def test_a_metric_that_is_updated_for_each_sample_counts_samples(means: MeansOverSteps) -> None:
    metric = weighed(means)
    for parts in ([[1.0, 2.0], [3.0, 4.0]], [[8.0]]):
        with means.batch(len(parts), 2):
            for losses in parts:
                means.begin_microbatch(len(losses))
                for loss in losses:
                    metric.update(loss)
    assert float(metric.compute()) == pytest.approx(3.6)


def test_several_numbers_of_a_step_count_as_batches_too(means: MeansOverSteps) -> None:
    metric = weighed(means)
    for losses, samples in ([1.0, 2.0, 3.0, 4.0], 3), ([9.0], 1):
        with means.batch(len(losses), 4):
            for loss in losses:
                means.begin_microbatch(samples)
                metric.update(loss)
                metric.update(2 * loss)
    assert float(metric.compute()) == pytest.approx((2.5 + 5 + 9 + 18) / 4)


def test_outside_of_steps_nothing_is_weighed(means: MeansOverSteps) -> None:
    metric = weighed(means)
    with pytest.raises(ValueError), means.batch(1, 4):
        raise ValueError
    metric.update(1.0)
    assert float(metric.weight) == 1.0
    assert float(copy.deepcopy(metric).compute()) == 1.0


@pytest.fixture
def as_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def added(*numbers: float | torch.Tensor) -> dict[tuple[str, str], Change]:
    held: list[float | torch.Tensor] = [0.5]
    before = Outline.of(held)
    held.extend(numbers)
    return {("net", "losses"): change_since(before, held)}


def test_a_list_with_fewer_losses_of_a_smaller_batch_is_told_of_once(as_errors: None) -> None:
    lists = UnevenLists()
    lists.look(added(1.0, torch.tensor(2.0)), 2)
    with pytest.raises(UserWarning, match=r"adds a number to self\.net\.losses .* 2 in earlier batches, and 1 in"):
        lists.look(added(3.0), 1)
    lists.look(added(3.0), 1)


def test_lists_of_batches_alike_or_of_anything_else_are_not(as_errors: None) -> None:
    lists = UnevenLists()
    lists.look(added(1.0), 1)  # as where a step runs call by call
    lists.look(added(1.0), 1)
    lists.look(added(torch.ones(2), torch.ones(2)), 2)
    lists.look(added(torch.ones(1)), 1)
