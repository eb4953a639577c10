"""Temporary memory of an optimizer's step, as planned, is what its real step on parameters of their sizes takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_shard.dryrun.counting.ledger import Ledger
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.optimizer import ask
from lightning_shard.plugin.settings import Settings

WIDTHS = 128, 8, 16
"""The largest first, and by far: a loop over parameters still has what it needed for the one before."""


class Module(L.LightningModule):
    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in WIDTHS))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def planned(make: Callable[..., torch.optim.Optimizer], device_type: str) -> int:
    state, reason = ask(
        Model.of(Module(make), torch.zeros(4), Settings("auto", None, None), stages=1, device_type=device_type)
    )
    assert state is not None, reason
    return state.steps_with([4 * width * width for width in WIDTHS])


def real(make: Callable[..., torch.optim.Optimizer], **how: Any) -> int:
    module = Module(make)
    optimizer = module.configure_optimizers()
    for group in optimizer.param_groups:
        group.update(how)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with (ledger := Ledger()):
            ledger.begin("step")
            optimizer.step()
    return ledger.growth["step"]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda of: torch.optim.Adam(of, amsgrad=True),
    "SGD": lambda of: torch.optim.SGD(of, 0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_a_step_works_on_all_parameters_at_once(name: str) -> None:
    make = OPTIMIZERS[name]
    assert planned(make, "cuda") == pytest.approx(real(make, foreach=True), rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_the_cpu_on_one_after_the_other(name: str) -> None:
    make = OPTIMIZERS[name]
    assert planned(make, "cpu") == pytest.approx(real(make, foreach=False), rel=0.02)
