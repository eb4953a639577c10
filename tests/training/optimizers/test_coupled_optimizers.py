"""Which optimizers can't step on a pipeline stage's parameters alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.optimizers.sharded import refuse
from lightning_shard.plugin.optimizers.trials import depends_on_others


class Own(torch.optim.Optimizer):
    """Signs, each element by itself."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def scale(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        scale = self.scale()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["decay"]).add_(p.grad / scale, alpha=-group["lr"])


class ByNorm(Own):
    """Limits the step by the norm of all gradients, as LAMB does."""

    def scale(self) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        return max(1.0, float(torch.nn.utils.get_total_norm(gradients)))


class ByNormInSomeGroups(Own):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.by_norm = any(group.get("by_norm") and group["params"] for group in self.param_groups)
        super().step(closure)

    def scale(self) -> Any:
        return ByNorm.scale(self) if self.by_norm else 1.0  # type: ignore[arg-type]


class Around(torch.optim.Optimizer):
    """Of another optimizer: steps from gradients a little way up, by the norm of all or by each one's."""

    def __init__(self, params: Any, base: Any, by_all: bool) -> None:
        super().__init__(params, {"by_all": by_all})
        self.base = base(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        held = [(group, p, p.clone()) for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for _, p, _ in held])
        for group, p, _ in held:
            p.add_(p.grad / (norm if group["by_all"] else p.grad.norm()))
        closure()
        for _, p, before in held:
            p.copy_(before)
        self.base.step()


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]


def test_what_takes_something_over_all_parameters_is_found() -> None:
    before = torch.get_rng_state()
    assert depends_on_others(ByNorm(parameters()))
    for optimizer in (Own(parameters()), torch.optim.AdamW(parameters())):
        assert not depends_on_others(optimizer)
    first, second = parameters()
    assert depends_on_others(ByNormInSomeGroups([{"params": [first]}, {"params": [second], "by_norm": True}]))
    assert not depends_on_others(ByNormInSomeGroups([{"params": [first]}, {"params": [second], "by_norm": False}]))
    assert torch.equal(before, torch.get_rng_state())


def test_one_around_another_is_tried_too_and_takes_no_step() -> None:
    """Sharpness-aware minimisation trained by its stage's norm."""
    for by_all in (True, False):
        held = [p.requires_grad_() for p in parameters()]
        for p in held:
            p.grad = torch.ones_like(p)
        optimizer = Around([{"params": held[:1]}, {"params": held[1:]}], torch.optim.SGD, by_all)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert depends_on_others(optimizer) is by_all
        assert not any(p.any() for p in held)
        assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
        assert not optimizer.state
        assert not optimizer.base.state


def test_it_is_refused_on_stages_only() -> None:
    refuse(ByNorm(parameters()), Layout(data_parallel_size=2))
    with pytest.raises(ConfigurationError, match="ByNorm updates each parameter depending on others"):
        refuse(ByNorm(parameters()), Layout(pipeline_parallel_size=2))
