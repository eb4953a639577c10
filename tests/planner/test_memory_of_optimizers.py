"""What an optimizer keeps, and what its step takes for a time, as planned, are those of its real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import lightning_shard
from lightning_shard.dryrun.counting.counts import Ledger
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.optimizer import ask
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.settings import Settings

WIDTHS = 128, 8, 16
"""The largest first, and by far: a loop over parameters still has what it needed for the one before."""


class Module(L.LightningModule):
    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in WIDTHS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([layer(batch.new_zeros(len(layer.weight))).sum() for layer in self.layers]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def planned(make: Callable[..., torch.optim.Optimizer], device_type: str) -> int:
    state = ask(Model.of(Module(make), torch.zeros(4), Settings("auto", None, None), stages=1, device_type=device_type))
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


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_a_step_works_on_all_parameters_at_once_on_the_cpu_on_one_after_the_other(
    name: str, device_type: str
) -> None:
    expected = real(OPTIMIZERS[name], foreach=device_type == "cuda")
    assert planned(OPTIMIZERS[name], device_type) == pytest.approx(expected, rel=0.02)


class Keeping(torch.optim.Optimizer):
    """Keeps what a function makes of each parameter."""

    def __init__(self, of: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(of, {"lr": 0.1})
        self.make = make

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"kept": self.make(parameter.detach())}


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "flat": lambda p: torch.zeros(p.numel(), dtype=torch.bfloat16),
    "in lists and dicts": lambda p: [torch.zeros_like(p), {"of": (torch.zeros_like(p), 5, None)}],
    "a history": lambda p: torch.zeros(4, *p.shape),
    "transposed": lambda p: p.mT.contiguous(),
    "a table": lambda p: torch.zeros(3, 256),
    "of rows and columns": lambda p: (torch.eye(p.shape[0]), torch.eye(p.shape[1]), torch.zeros(p.shape[0], 1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_all_that_an_optimizer_keeps_counts(name: str) -> None:
    def make(of: Any) -> torch.optim.Optimizer:
        return Keeping(of, KEPT[name])

    module = Module(make)
    optimizer = module.configure_optimizers()
    optimizer.step()
    real = sum(
        leaf.nbytes for leaf in pytree.tree_leaves([*optimizer.state.values()]) if isinstance(leaf, torch.Tensor)
    )
    plan = lightning_shard.plan(Module(make), torch.zeros(4), layout={"data_parallel_size": 1}, device_type="cpu")
    assert plan.stages[0].peak.bytes["optimizer"] == real
    saved = sum(4 * width * width for width in WIDTHS) + real
    assert saved <= plan.checkpoint.bytes < saved + 20_000  # headers and a manifest


@pytest.mark.parametrize("keeps", [lambda p: torch.zeros(p.shape[0] + 1), lambda p: torch.zeros(p.numel() // 7)])
def test_state_whose_size_does_not_follow_from_a_parameters_is_refused(keeps: Callable[[torch.Tensor], Any]) -> None:
    module = Module(lambda of: Keeping(of, keeps))
    with pytest.raises(ConfigurationError, match=r"it keeps 'kept' of"):
        ask(Model.of(module, torch.zeros(4), Settings("auto", None, None), stages=1))
