"""Precisions that aren't supported are refused where a Trainer is made."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError


@pytest.mark.parametrize("strategy", [HybridShardStrategy, lambda: "hybrid_shard"], ids=["instance", "name"])
@pytest.mark.parametrize(
    ("precision", "says"),
    [
        ("transformer-engine", "'transformer-engine' isn't supported by HybridShardStrategy"),
        ("16-mixed", "'16-mixed' isn't done on the CPU .* use precision='bf16-mixed'"),
    ],
)
def test_precisions_are_refused_by_name_before_any_process_starts(precision: Any, says: str, strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=says):
        L.Trainer(strategy=strategy(), precision=precision, accelerator="cpu", devices=1, logger=False)
