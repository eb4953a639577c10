"""What a pipelined step keeps beside gradients is warned of."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_shard.plugin.steps.state.counters import warning_of_numbers_kept, warning_of_tensors_changed


def test_counters_that_a_pipelined_step_keeps_are_warned_of() -> None:
    module = L.LightningModule()
    module.batches, module.best, module.name = 0, 0.5, "a"
    warned = pytest.warns(UserWarning, match=r"training_step changed self\.batches\. .* 4 microbatches")
    with warned, warning_of_numbers_kept(module, "training_step", 4):
        module.batches += 1
    with warnings.catch_warnings(), warning_of_numbers_kept(module, "training_step", 4):
        warnings.simplefilter("error")
        module.name, module.another = "b", 3


class Meter:
    def __init__(self) -> None:
        self.seen = 0


def test_numbers_that_a_pipelined_step_keeps_beside_the_module_are_warned_of() -> None:
    module = L.LightningModule()
    module.block, module.metric, module.meter = nn.Linear(2, 2), MeanMetric(), Meter()
    module.block.calls, module.kept = 0, {"steps": 0, "lowest": math.nan}
    changed = r"training_step changed block\.calls, meter\.seen, kept\.steps\. .* 4 microbatches"
    with pytest.warns(UserWarning, match=changed), warning_of_numbers_kept(module, "training_step", 4, within=True):
        module.block.calls = module.meter.seen = module.kept["steps"] = 1
    with warnings.catch_warnings(), warning_of_numbers_kept(module, "training_step", 4, within=True):
        warnings.simplefilter("error")
        module.own, module.block.width, module.kept["of_this_batch"] = 1, 2, 3
        module.metric.update(1.0)


def test_statistics_that_a_pipelined_step_keeps_are_warned_of() -> None:
    module = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "codes": nn.Module(), "same": nn.Module()})
    codes: Any = module["codes"]
    codes.register_buffer("mean", torch.zeros(2))
    codes.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    module["same"].register_buffer("table", torch.ones(2))
    module["same"].register_buffer("positions", torch.zeros(1))
    module["same"].register_buffer("in_8_bits", torch.ones(2).to(torch.float8_e4m3fn))
    warned = pytest.warns(UserWarning, match=r"changed codes\.mean\. .* 4 microbatches")
    with warned, warning_of_tensors_changed(module, 4):
        codes.mean.data.add_(1)  # no version says so
    with warnings.catch_warnings(), warning_of_tensors_changed(module, 4):
        warnings.simplefilter("error")
        module["norm"](torch.randn(3, 2))
        codes.count.add_(1)
        module["same"].table = torch.ones(2)  # made anew, as a cache
        module["same"].positions = torch.arange(3.0)  # for a length


def test_losses_and_hidden_states_that_a_pipelined_step_keeps_are_warned_of() -> None:
    module = nn.ModuleDict({"block": nn.Linear(2, 2), "metric": MeanMetric()})
    block: Any = module["block"]
    block.metrics, block.named = [MeanMetric()], {"width": 2}

    def step() -> None:
        block.hidden = block(torch.randn(3, 2)).detach()
        block.in_graph = block(torch.randn(3, 2))
        block.cache = torch.ones(2)
        module["metric"].update(1.0)
        block.metrics[0].update(1.0)

    with warnings.catch_warnings(), warning_of_tensors_changed(module, 4):
        warnings.simplefilter("error")
        step()
    with pytest.warns(UserWarning, match=r"changed block\.hidden\. "), warning_of_tensors_changed(module, 4):
        step()


CENTER = {"of classes": torch.zeros(2)}


class Centers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CENTER["of classes"] = CENTER["of classes"] * 0.9 + x.detach().mean(0)
        return x


def test_moving_averages_in_globals_are_warned_of() -> None:
    module = Centers()
    changed = pytest.warns(UserWarning, match=r"changed .*test_counters\.CENTER\.of classes\. ")
    with changed, warning_of_tensors_changed(module, 4):
        module(torch.ones(3, 2))


def test_nan_is_no_change() -> None:
    module = L.LightningModule()
    module.register_buffer("threshold", torch.tensor([torch.nan, 1.0]))
    with warnings.catch_warnings(), warning_of_tensors_changed(module, 4):
        warnings.simplefilter("error")
    with pytest.warns(UserWarning, match="training_step changed threshold"), warning_of_tensors_changed(module, 4):
        module.threshold[1] = 2  # type: ignore[operator]
