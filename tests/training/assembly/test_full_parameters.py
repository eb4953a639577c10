"""What gather_full_parameters returns on one data rank, where nothing has to be gathered."""

from __future__ import annotations

import torch
from torch import nn

from lightning_shard.layout import Layout
from lightning_shard.plugin.assembly.parameters import gather_parameters


def test_a_snapshot_stays_when_the_parameters_change() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    snapshot = gather_parameters(module, Layout.resolve(1, 0), None, torch.device("cpu"))
    nn.init.zeros_(module.weight)
    assert torch.equal(snapshot["weight"], before)
