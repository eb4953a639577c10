"""Synchronized BatchNorm where the samples of all ranks together are one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.parallel import batch_norm
from lightning_shard.parallel.batch_norm import synchronize


def test_one_value_per_channel_is_refused_and_changes_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "summed_both_ways", lambda part, group: part)
    layer, group = nn.BatchNorm1d(3), object()
    plain: Any = group
    synchronize(layer, plain)
    with pytest.raises(StepError, match=r"one value per channel .*shape \(1, 3\).*drop_last=True"):
        layer(torch.randn(1, 3))
    assert layer.running_var is not None
    assert torch.equal(layer.running_var, torch.ones(3))
    layer(torch.randn(2, 3))
    assert layer.running_var.isfinite().all()
