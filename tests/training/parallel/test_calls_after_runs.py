"""A module, and parts of it, that are called between steps or after a run: as on one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.errors import StepError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends

WIDTH = 16
DATA = {"data_parallel_size": 2}
PLAN = {"layers.*.0": "colwise", "layers.*.2": "rowwise"}


class Model(Descends):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), torch.ones_like(batch))


def samples() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def fitted(sizes: dict[str, Any] | None) -> Model:
    module = Model()
    trainer = trainer_of(sizes or None, max_steps=2)
    trainer.fit(module, DataLoader(samples(), batch_size=4 if sizes == DATA else 8))
    return module


def called(sizes: dict[str, Any] | None) -> dict[str, Tensor]:
    """What the module and its parts return, and gradients of parts: all since the run."""
    module, x = fitted(sizes), samples()[:4]
    module.zero_grad()
    found = {"whole": module(x), "head": module.head(x), "layer": module.layers[0](x)}
    (module.head(x).square().mean() + module.layers[0](x).square().mean()).backward()
    for name in ("head.weight", "layers.0.2.weight"):
        gradient = module.get_parameter(name).grad
        found[f"{name}.grad"] = full_tensor(gradient)
    return {name: tensor.detach() for name, tensor in found.items()}


@pytest.mark.parametrize(
    "sizes",
    [pytest.param({"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}, marks=pytest.mark.long), DATA],
    ids=["tp2", "dp2"],
)
def test_it_returns_what_it_does_on_one_process_and_gradients_of_parts_arrive(sizes: dict[str, Any]) -> None:
    expected = called(None)
    for ours in run_ranks(called, 2, sizes, elastic=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)


class CallsInHooks(Model):
    """Calls parts, or all of itself, with gradients; then clips what it sees as its gradients."""

    def __init__(self, hook: str, part: str) -> None:
        super().__init__()
        self.losses: list[float] = []
        setattr(self, hook, self.call)
        self.part = part

    def call(self, *_: Any) -> None:
        called = self.get_submodule(self.part)(samples())
        if self.part == "layers.0":
            called.square().mean().backward()
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(samples(), batch_idx)
        self.losses.append(float(loss))
        return loss


HOOKS = ("on_after_backward", "on_train_batch_end")
PARTS = ("", "layers.0")


def losses_with_calls(options: dict[str, Any] | None) -> dict[tuple[str, str], list[float]]:
    found = {}
    for hook in HOOKS:
        for part in PARTS:
            module = CallsInHooks(hook, part)
            trainer = trainer_of(options or None, max_steps=3)
            trainer.fit(module, DataLoader(samples(), batch_size=2))
            found[hook, part] = module.losses
    return found


def test_calls_in_hooks_leave_no_old_weights_to_the_next_step() -> None:
    plain = losses_with_calls(None)
    for ours in run_ranks(losses_with_calls, 2, {**DATA, "reshard_after_forward": False}, elastic=True):
        for case, losses in plain.items():
            assert ours[case] == pytest.approx(losses, rel=1e-5), case


def refused() -> list[str]:
    """What each says; one whose weights are on another stage is unknown, until it is asked for."""
    module, x = fitted({"pipeline_parallel_size": 2}), samples()[:4]
    found = []
    for part in (module.enter, module.layers[0], module.layers[1], module.head, module):
        with pytest.raises(StepError) as error:
            float(part(x).sum())
        found.append(str(error.value))
    return found


def test_on_stages_all_that_is_called_is_refused_by_name() -> None:
    last, first = run_ranks(refused, 2, elastic=True)
    for held, others in ((first, last), (last[::-1][1:], first[::-1][1:])):  # a part, and a block
        assert held[0].startswith("A part of the network, a Linear, was called outside a step.")
        assert held[1].startswith("A part of the network, a Sequential, was called outside a step.")
        assert "weight, which stage" in others[0]
        assert others[1].startswith("The network was called outside a step")
    for whole in (first[-1], last[-1]):
        assert whole.startswith("The network was called outside a step")
        assert "load_from_checkpoint" in whole
