"""What of Lightning is refused or warned of at setup, or in the first step of a kind."""

from __future__ import annotations

import warnings

import lightning as L
import pytest

from lightning_shard.plugin.limits import warning_of_numbers_kept


def test_counters_that_a_pipelined_step_keeps_are_warned_of() -> None:
    module = L.LightningModule()
    module.batches, module.best, module.name = 0, 0.5, "a"
    warned = pytest.warns(UserWarning, match=r"training_step changed self\.batches\. .* 4 microbatches")
    with warned, warning_of_numbers_kept(module, "training_step", 4):
        module.batches += 1
    with warnings.catch_warnings(), warning_of_numbers_kept(module, "training_step", 4):
        warnings.simplefilter("error")
        module.name, module.another = "b", 3
