"""Batches that a stage takes before their turn: the loop is told of each batch what it would be told without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_shard.plugin.steps.look_ahead import BatchesAhead


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("has_length", [True, False])
def test_only_the_last_batch_is_told_to_be_the_last_however_many_were_taken_before_their_turn(
    most: int, has_length: bool
) -> None:
    batches = ["a", "b", "c", "d"]
    combined = CombinedLoader([batches if has_length else (batch for batch in batches)], "sequential")
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    loop: Any = SimpleNamespace(
        _data_fetcher=fetcher,
        num_dataloaders=1,
        _build_kwargs=lambda batch, batch_idx, loader_idx: {"batch": batch},
        _build_step_args_from_hook_kwargs=lambda kwargs, method: tuple(kwargs.values()),
    )
    ahead = BatchesAhead(loop, "validation_step", lambda batch, loader: batch)
    seen = []
    for batch, batch_idx, _ in ahead:
        taken = [later for (later,), _ in zip(ahead.upcoming(), range(most))]
        assert taken == batches[batch_idx + 1 :][:most]
        seen.append((batch, ahead.done))
    assert seen == [("a", False), ("b", False), ("c", False), ("d", True)]
