"""The look at whether a plan fits: it leaves nothing behind, and lets right code be."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_shard.errors import PlanError
from lightning_shard.parallel.tensor import check_blocks
from lightning_shard.parallel.tensor.check_blocks import SplitBlocksCheck
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


def called(block: Block, x: Tensor, *others: Any, is_part: bool = False, split: Forward | None = None) -> Any:
    """What its first call returns, in which it is compared with itself, or with ``split``."""
    root = nn.ModuleDict({"block": block})
    blocks: dict[str, nn.Module] = {"block": block}
    parts, blocks = (blocks, {}) if is_part else ({}, blocks)
    looks, styles = partial(trial_runs, x.device), {"block.linear": ColwiseParallel()}
    compared = SplitBlocksCheck(blocks, parts, styles, looks, lambda _: suppress(Exception))
    if split is not None:
        block.compute = split
    compared.compare(root)
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


def test_noise_for_a_part_of_the_features_cant_be_compared() -> None:
    def whole(block: Block, x: Tensor) -> Tensor:
        return F.dropout(block.linear(x), 0.5).sum(-1, keepdim=True)

    def split(block: Block, x: Tensor) -> Tensor:
        return F.dropout(F.linear(x, block.linear.weight[:2], block.linear.bias[:2]), 0.5).sum(-1, keepdim=True)

    called(Block(whole), torch.ones(64, 4), split=split)


def through(block: Block, x: Tensor) -> Tensor:
    return block.linear(x)


def of_a_part(block: Block, x: Tensor) -> Tensor:
    return F.linear(x, block.linear.weight[:, :2], block.linear.bias)


def test_a_part_that_is_given_split_features_cant_be_compared() -> None:
    block = Block(through)
    called(block, torch.ones(2, 2), is_part=True, split=of_a_part)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        called(Block(through), torch.ones(2, 2), is_part=True)


def test_empty_outputs_are_alike() -> None:
    def none_of_it(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        y = block.linear(x)
        return y, y[y[:, 0] > 1e9]

    called(Block(none_of_it), torch.ones(2, 4))


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("compute", [through, adds_noise])
def test_other_numbers_are_refused(compute: Forward, is_part: bool) -> None:
    def other(block: Block, x: Tensor) -> Tensor:
        return compute(block, x) + 3 * x

    with pytest.raises(PlanError, match="block computes something else when it is split"):
        called(Block(compute), torch.ones(2, 4), is_part=is_part, split=other)


@pytest.mark.parametrize("how", ["evaluated", "without gradients"])
def test_other_numbers_are_refused_without_training_too(how: str) -> None:
    def other(block: Block, x: Tensor) -> Tensor:
        return through(block, x) + 3 * x

    block = Block(through).train(how != "evaluated")
    with torch.no_grad(), pytest.raises(PlanError, match="block computes something else when it is split"):
        called(block, torch.ones(2, 4), split=other)


def test_after_an_evaluation_the_first_call_in_training_is_compared_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[bool] = []
    monkeypatch.setattr(check_blocks, "_check", lambda *_, trains, **__: compared.append(trains))
    block, x = Block(through).eval(), torch.ones(2, 4)
    called(block, x)
    block(x)
    assert compared == [False]
    block.train()(x)
    block(x)
    block.eval()(x)
    assert compared == [False, True]


class Cache:
    """What a look at arguments takes for a cache of keys and values, and leaves out."""

    def get_seq_length(self) -> int:
        return 1


def test_what_fails_without_its_cache_is_let_be_in_an_evaluation() -> None:
    def with_cache(block: Block, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is None:
            raise ValueError("no cache")
        return block.linear(x)

    assert called(Block(with_cache).eval(), torch.ones(2, 4), Cache()).shape == (2, 4)
