"""Batches that ranks must share, and those that they should not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lightning_shard.errors import BatchError
from lightning_shard.layout import Layout
from lightning_shard.parallel.rank_compare import by_name, digest_of
from lightning_shard.plugin.steps.checks import agreement


def check(monkeypatch: pytest.MonkeyPatch, batches: list[Any], **sizes: int) -> None:
    """On rank 0, where each rank has read one of the batches."""
    layout = Layout.resolve(len(batches), 0, **{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, **sizes})
    gathered = [{layout.at(rank).data_rank: digest_of(batch)} for rank, batch in enumerate(batches)]
    monkeypatch.setattr(agreement, "exchanged", lambda group, own: [by_name(gathered)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreement.check_same_batch(batches[0], layout)


ONE, OTHER = {"x": torch.zeros(2)}, {"x": torch.ones(2)}


def test_data_ranks_that_read_the_same_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, [ONE, OTHER], data_parallel_size=2)
    check(monkeypatch, [torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()], data_parallel_size=2)
    jagged = [torch.nested.nested_tensor([torch.ones(n), torch.ones(3)], layout=torch.jagged) for n in (2, 4)]
    check(monkeypatch, jagged, data_parallel_size=2)
    check(monkeypatch, [["a"], ["a"]], data_parallel_size=2)  # nothing to tell them apart by
    check(monkeypatch, [ONE, ONE, OTHER, OTHER], data_parallel_size=2, tensor_parallel_size=2)
    with pytest.raises(UserWarning, match="the same on 2 of 2 data ranks"):
        check(monkeypatch, [ONE, ONE], data_parallel_size=2)


def test_ranks_of_a_data_rank_that_read_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatchError, match="Ranks 0 and 1"):
        check(monkeypatch, [ONE, OTHER], tensor_parallel_size=2, data_parallel_size=1)
