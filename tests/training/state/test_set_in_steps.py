"""One rank, whose parameters are held without FSDP2: what a step sets on them is kept, and what can't be is refused."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError, StepError
from tests.parity import QUIET
from tests.training.parallel.small import Descends


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Setting(Descends):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.net = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.known = list(self.net.parameters()) if how == "list" else []
        if how == "hook":
            self.head.weight.register_hook(lambda gradient: gradient * 0)
        if how == "watched":  # as WandbLogger.watch(log="parameters") does, on rank 0 alone
            vars(self.net)["_wandb_hook_names"] = ["parameters/"]
        if how == "accumulated":
            self.head.weight.register_post_accumulate_grad_hook(_halve)

    def on_train_start(self) -> None:
        if self.how == "called":
            self(torch.ones(4))
        if self.how == "accumulated late":
            self.head.weight.register_post_accumulate_grad_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).tanh())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.how == "freeze" and batch_idx == 1:
            self.head.requires_grad_(False)
        if self.how == "data" and batch_idx == 1:  # the first step is looked through, and refused
            self.head.weight.data = self.head.weight.data * 0.9
        if self.how == "replace" and batch_idx == 1:
            self.head.weight = nn.Parameter(torch.ones(1, 4))
        if self.how == "none" and batch_idx % 2:
            return None
        loss: Tensor = self.forward(batch).square().mean()
        if self.how == "backward":
            loss.backward(retain_graph=True)
        return loss + sum(parameter.square().sum() for parameter in self.known)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.9)


def fit(how: str, strategy: Any, **options: Any) -> dict[str, Tensor]:
    module = Setting(how)
    samples = torch.linspace(-1, 1, 24).view(6, 4)
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, **{**QUIET, **options})
    trainer.fit(module, DataLoader(samples, batch_size=1))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("how", "batches"),
    [("freeze", 1), ("data", 1), ("backward", 1), ("none", 2), ("accumulated late", 1), ("called", 2)],
)
def test_what_a_step_sets_or_leaves_out_is_as_on_one_process(how: str, batches: int) -> None:
    """The first were lost silently: the freezing, the values, ``zero_grad``, an accumulation that ends with ``None``.

    After a call before the first step, hooks of ours were taken for the user's.
    """
    plain = fit(how, "auto", accumulate_grad_batches=batches)
    ours = fit(how, HybridShardStrategy(), accumulate_grad_batches=batches)
    for name, value in plain.items():
        whole: Any = ours[name]
        torch.testing.assert_close(whole.full_tensor().cpu(), value.cpu())


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("replace", StepError, "was replaced or removed"),
        ("list", StepError, "The loss is computed from a parameter as it is between steps"),
        ("hook", ConfigurationError, "head.weight has a hook on its gradient"),
        ("watched", ConfigurationError, "W&B watches the Linear"),
        ("accumulated", ConfigurationError, "head.weight has a post-accumulate-gradient hook"),
    ],
)
def test_what_would_be_lost_is_refused(how: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as refusal:
        fit(how, HybridShardStrategy())
    assert says in str(refusal.value) or says.replace("weight", "bias") in str(refusal.value)


def test_hooks_on_sums_of_gradients_are_refused_where_batches_are_accumulated() -> None:
    """They were called once for all of these, and on one process after each."""
    with pytest.raises(ConfigurationError, match=r"gradient hook .* on one process it runs after each batch"):
        fit("accumulated late", HybridShardStrategy(), accumulate_grad_batches=2)


def test_a_snapshot_of_all_parameters_stays_when_they_change() -> None:
    """Where nothing has to be gathered."""
    module, strategy = Setting("once"), HybridShardStrategy()
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=1, **QUIET)
    trainer.fit(module, DataLoader(torch.ones(1, 4), batch_size=1))
    snapshot = strategy.gather_full_parameters()
    nn.init.zeros_(module.head.weight)
    assert snapshot["head.weight"].any()
