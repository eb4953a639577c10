"""Which split modules hand on what is whole."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleOutput, RowwiseParallel

from lightning_shard.parallel.handed_on import OutputGradients, remember_whole_outputs
from lightning_shard.parallel.styles import STYLES


@pytest.mark.parametrize(
    ("style", "is_whole"),
    [
        (STYLES["colwise"], False),
        (STYLES["rowwise"], True),
        (STYLES["colwise_gather_output"], True),
        (ColwiseParallel(), False),
        (ColwiseParallel(output_layouts=Replicate()), True),
        (RowwiseParallel(), True),
        (RowwiseParallel(output_layouts=Shard(1)), False),
        (PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(-1)), False),
        (PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()), True),
    ],
)
def test_of_our_styles_and_of_torchs(style: ParallelStyle, is_whole: bool) -> None:
    root = nn.ModuleDict({"layer": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    remember_whole_outputs(root, {"layer": style})
    assert [*OutputGradients(root).take()] == ["layer"] * is_whole
