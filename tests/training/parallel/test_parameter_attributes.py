"""What a user sets on parameters is there for optimizers, in steps, and between them, however they are laid out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import trainer_of
from tests.training.parallel.small import WIDTH, batches


class Block(nn.Module):
    """As state-space blocks do, it says which of its parameters aren't to decay, and what it was scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.skip = nn.Parameter(torch.ones(WIDTH))
        self.skip._no_weight_decay = True  # type: ignore[attr-defined]
        self.linear.weight.scaled_by = 0.5  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.linear.weight.scaled_by  # type: ignore[union-attr]
        return x + self.skip * scale * self.linear(x).tanh()


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight.scaled_by = 2.0  # type: ignore[attr-defined]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.head(self.blocks(batch)) * self.head.weight.scaled_by - batch).square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for block in self.blocks:
            if hasattr(block.linear.weight, "scaled_by"):
                block.linear.weight.scaled_by = 0.5 + batch_idx

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.head.weight.scaled_by == 2
        held = [each for group in optimizer.param_groups for each in group["params"]]
        assert any(hasattr(each, "scaled_by") for each in held)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kept = [each for each in self.parameters() if getattr(each, "_no_weight_decay", False)]
        decayed = [each for each in self.parameters() if not hasattr(each, "_no_weight_decay")]
        assert (len(kept), len(decayed)) == (4, 9)
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 1.0}, {"params": kept, "weight_decay": 0}]
        return torch.optim.AdamW(groups, lr=1e-2)


def fits_again() -> None:
    module = Module()
    for _ in range(2):  # after a fit Lightning moves parameters
        trainer = trainer_of({}, max_epochs=1)
        trainer.fit(module, DataLoader(torch.stack(batches()).flatten(0, 1), batch_size=4))


def test_they_are_kept_for_a_second_fit() -> None:
    run_ranks(fits_again, 2, elastic=True)


@dataclass
class Groups:
    biases: tuple[Any, ...]
    queue: deque[Any]


class KeepsThem(Module):
    """In ``__init__``, before they are replaced: ids, a dict by parameter, lists, in objects and closures too."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(True)
        self.ids = {id(self.head.weight)}
        self.rates = {parameter: 1e-2 * (1 + place) for place, parameter in enumerate(self.parameters())}
        self.slow = [[block.linear.weight for block in self.blocks], (self.head.weight,)]
        self.groups = Groups(tuple(block.linear.bias for block in self.blocks), deque([self.head.weight]))
        known = set(self.head.parameters())
        self.is_of_head = lambda parameter: parameter in known
        self.is_never_called = lambda: unassigned
        if self.groups is None:
            unassigned = known  # so the closure has an empty cell

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert sum(id(each) in self.ids for each in self.parameters()) == 1
        assert sum(self.is_of_head(each) for each in self.parameters()) == 1
        assert sum(each is self.groups.queue[0] for each in self.parameters()) == 1
        groups = [{"params": [each], "lr": rate} for each, rate in self.rates.items()]
        return torch.optim.SGD(groups, lr=1.0)

    def on_after_backward(self) -> None:
        for parameter in self.slow[0]:
            if parameter.grad is not None:
                parameter.grad *= 0.1
        torch.nn.utils.clip_grad_norm_(self.groups.biases, 1e-3)


def test_they_are_kept_and_what_was_kept_of_them_goes_on_with_those_that_replace_them() -> None:
    split = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"blocks.*.linear": "colwise_gather_output"}}
    on_parameters, of_them = Trains(Module, batches, ["dp2", split]), Trains(KeepsThem, batches, "pp2 x dp2")
    assert_train_alike({"attributes": on_parameters, "ids, dicts, lists and closures": of_them})
