"""Means over steps count batches alike, into however many microbatches each is split."""

from __future__ import annotations

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_shard.plugin.steps.means_over_steps import MeansOverSteps


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
