"""Datasets that are longer on one rank than on another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import Model, Tokens, trainer_of


def fit(stages: int) -> None:
    trainer = trainer_of({"pipeline_parallel_size": stages}, max_epochs=1)
    trainer.fit(Model(), DataLoader(Tokens(48 if os.environ["RANK"] == "0" else 32), batch_size=8))


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_dataset_of_another_length_on_another_rank_is_refused_before_the_first_step(stages: int) -> None:
    first, other = {1: (3, 2), 2: (6, 4)}[stages]
    told = f"a Tokens gives {first} batches on rank 0 and {other} batches on rank 1"
    with pytest.raises(RanksFailed, match=f"ConfigurationError: A DataLoader of {told}"):
        run_ranks(fit, 2, stages, elastic=True)


LONG = pytest.mark.long


class Stream(IterableDataset[Any]):
    """Of unknown length."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        tokens = Tokens(self.samples)
        return (tokens[i] for i in range(self.samples))


def run_streamed(method: str, schedule: str, *sizes: int) -> int:
    trainer = trainer_of({"pipeline_parallel_size": 2, "schedule": schedule}, max_epochs=1, accumulate_grad_batches=2)
    getattr(trainer, method)(Model(), DataLoader(Stream(sizes[int(os.environ["RANK"])]), batch_size=8))
    return trainer.global_step


def test_streams_alike_end_together_with_a_smaller_batch() -> None:
    assert run_ranks(run_streamed, 2, "fit", "1F1B", 28, 28, elastic=True) == [2, 2]


@pytest.mark.parametrize(
    ("method", "schedule", "sizes", "says"),
    [
        ("fit", "1F1B", (24, 16), "reads no more batch next, and the last pipeline stage a batch of 8 samples"),
        pytest.param("fit", "Interleaved1F1B", (16, 24), "reads a batch of 8 .* and the last .* no more", marks=LONG),
        pytest.param("fit", "1F1B", (24, 20), "reads a batch of 4 samples .* and the last .* 8 samples", marks=LONG),
        pytest.param("validate", "1F1B", (24, 16), "reads no more batch next, and the last .* 8 samples", marks=LONG),
    ],
)
def test_a_stream_that_ends_elsewhere_on_another_stage_is_refused_where_it_does(
    method: str, schedule: str, sizes: tuple[int, int], says: str
) -> None:
    with pytest.raises(RanksFailed, match=f"BatchError: This rank {says}"):
        run_ranks(run_streamed, 2, method, schedule, *sizes, elastic=True)


class TakesIterator(Model):
    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        next(dataloader_iter)


def validate_by_iterator() -> None:
    trainer = trainer_of({"pipeline_parallel_size": 2})
    trainer.validate(TakesIterator(), DataLoader(Stream(8), batch_size=8))


def test_a_validation_step_that_takes_an_iterator_of_batches_is_refused_by_its_name() -> None:
    with pytest.raises(RanksFailed, match=r"ConfigurationError: .*a validation_step that takes dataloader_iter"):
        run_ranks(validate_by_iterator, 2, elastic=True)
