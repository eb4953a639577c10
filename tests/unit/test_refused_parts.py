"""What fails on a part of the features is refused in the plan's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_shard.errors import PlanError
from lightning_shard.plugin.steps.checks.tensor_ranks import refusing_parts


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.RMSNorm(8)])
def test_norms_over_all_features_that_are_given_some(norm: nn.Module) -> None:
    with pytest.raises(PlanError, match="The first step fails with tensor_parallel_plan"), refusing_parts():
        norm(torch.ones(2, 4))
