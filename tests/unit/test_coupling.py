"""Which optimizers can't step on a pipeline stage's parameters alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.coupling import depends_on_others
from lightning_shard.plugin.optimizers import refuse


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


class Noisy(Own):
    def scale(self) -> Any:
        return 1 + torch.rand(())


class Unmakeable(ByNorm):
    def __init__(self, params: Any, module: Any) -> None:
        super().__init__(params)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]


def test_what_takes_something_over_all_parameters_is_found() -> None:
    before = torch.get_rng_state()
    assert depends_on_others(ByNorm(parameters()))
    for optimizer in (Own(parameters()), Noisy(parameters()), torch.optim.AdamW(parameters())):
        assert not depends_on_others(optimizer)
    assert not depends_on_others(Unmakeable(parameters(), None))  # nothing is known
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_refused_on_stages_only() -> None:
    refuse(ByNorm(parameters()), Layout(data_parallel_size=2))
    with pytest.raises(ConfigurationError, match="ByNorm takes something over all of its parameters"):
        refuse(ByNorm(parameters()), Layout(pipeline_parallel_size=2))
