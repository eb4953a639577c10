"""Which split modules hand on what is whole."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from lightning_shard.parallel.tensor.check_handed_on import OutputGradients, mark_outputs
from lightning_shard.parallel.tensor.styles import STYLES


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
    mark_outputs(root, {"layer": style})
    whole, _ = OutputGradients(root).take()
    assert [*whole] == ["layer"] * is_whole


@pytest.mark.parametrize(
    ("style", "is_added"),
    [
        (STYLES["colwise"], False),
        (STYLES["rowwise"], False),
        (STYLES["replicated_with_grad_allreduce"], True),
        (STYLES["shared_output"], True),
        (STYLES["sequence"], True),
        (STYLES["rowwise_sequence"], True),
        (STYLES["gather_sequence"], False),
        (SequenceParallel(), True),
        (RowwiseParallel(output_layouts=Shard(1)), True),
        (RowwiseParallel(), False),
    ],
)
def test_whose_gradients_are_added_up(style: ParallelStyle, is_added: bool) -> None:
    root = nn.ModuleDict({"layer": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    mark_outputs(root, {"layer": style})
    _, added = OutputGradients(root).take()
    assert [*added] == ["layer"] * is_added
