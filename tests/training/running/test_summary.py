"""The model summary of a module that is cut later is Lightning's own, of the whole module."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

from lightning_shard.plugin.reporting.summary import report_whole, summarize_before


class Network(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(8).eval(), nn.Linear(8, 4)
        self.example_input_array = torch.ones(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NeedsValues(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * x.sum().item())


def summary_of(module: L.LightningModule, depth: int = 2) -> Any:
    callback = ModelSummary(max_depth=depth)
    summarize_before(module, [callback])
    report_whole([callback], module, lambda value: [value])
    return callback._summary(L.Trainer(barebones=True), module)


def test_operations_and_sizes_are_those_of_the_whole_module() -> None:
    module = Network()
    module.head(torch.ones(1, 8))  # hooks and modes stay as they are
    seen, expected = summary_of(module), summarize(module, max_depth=2)
    assert seen.total_flops == expected.total_flops > 0
    columns = dict(seen._get_summary_data())
    assert {title: columns[title] for title, _ in expected._get_summary_data()} == dict(expected._get_summary_data())
    assert "In sizes" in columns
    assert module.example_input_array is not None
    assert (module.training, module.norm.training) == (True, False)


def test_where_the_example_needs_values_they_are_left_out() -> None:
    module = NeedsValues()
    columns = dict(summary_of(module)._get_summary_data())
    assert not {"FLOPs", "In sizes"} & set(columns)
    assert columns["Params"] == dict(summarize(module, max_depth=2)._get_summary_data())["Params"]
    assert (module.training, module.norm.training) == (True, False)
    assert not any(part._forward_hooks for part in module.modules())
