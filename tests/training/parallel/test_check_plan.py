"""The look at whether a plan fits: it leaves nothing behind, and lets right code be."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_shard.errors import PlanError
from lightning_shard.parallel.tensor.check_plan import PlanCheck
from lightning_shard.plugin.assembly.probe import trial_runs

Forward = Callable[..., Any]


class Block(nn.Module):
    """With state of all kinds, and a forward that is given."""

    def __init__(self, compute: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.kept: list[float] = []
        self.generator = torch.Generator()
        self.compute = compute

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.compute(self, x, *others)


def called(block: Block, x: Tensor, *others: Any, split: Callable[[Tensor], Tensor] | None = None) -> Any:
    """What its first call returns, in which it is compared with itself, or where its layer computes ``split``."""
    root = nn.ModuleDict({"block": block})
    runs = partial(trial_runs, x.device)
    check = PlanCheck(root, ["block"], {"block.linear": ColwiseParallel()}, runs, is_own=False)
    if split is not None:
        block.linear.forward = split  # type: ignore[method-assign]
    check.compare(root)
    return block(x, *others)


def counts(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    block.count += 1
    block.kept.append(float(block.count))
    return block.linear(x), block.count


def fails(block: Block, x: Tensor) -> Tensor:
    counts(block, x)
    torch.rand(1)
    raise ValueError("no")


def test_state_changes_once() -> None:
    block = Block(counts)
    called(block, torch.ones(2, 4))
    assert block.count == 1
    assert block.kept == [1.0]
    assert block.training


def test_what_a_failing_run_has_changed_is_put_back() -> None:
    block, before = Block(fails), torch.get_rng_state()
    with pytest.raises(ValueError, match="no"):
        called(block, torch.ones(2, 4))
    assert block.count == 0
    assert block.kept == []
    assert block.training
    assert torch.equal(torch.get_rng_state(), before)


def adds_noise(block: Block, x: Tensor) -> Tensor:
    own = torch.rand(x.shape, generator=block.generator)
    return F.dropout(block.linear(x), 0.5) + torch.randn_like(x) + own + random.random()


def test_both_runs_draw_what_the_step_does() -> None:
    block, x = Block(adds_noise), torch.ones(2, 4)
    states = torch.get_rng_state(), random.getstate(), block.generator.get_state()
    found = called(block, x)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    block.generator.set_state(states[2])
    assert torch.equal(found, block(x))


def with_other_numbers(block: Block) -> Callable[[Tensor], Tensor]:
    return lambda x: F.linear(x, block.linear.weight, block.linear.bias) + 3 * x


def test_other_numbers_beside_noise_are_refused() -> None:
    block = Block(adds_noise)
    with pytest.raises(PlanError, match=r"block computes something else when it is split.*what it returns"):
        called(block, torch.ones(2, 4), split=with_other_numbers(block))
