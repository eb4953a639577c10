"""Parts of sharded blocks that a step uses outside of the blocks' calls: refused, or gathered if they are named."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.alike import Trains, assert_train_alike
from tests.training.parallel.small import WIDTH, Descends, batches


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.layer(x * self.embed(condition)).tanh()


class CallsAPart(Descends):
    """As diffusers' DiT, which calls a part of its first block for its conditioning."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Conditioned() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = condition = batch.roll(1, -1)
        for block in self.blocks:
            x = block(x, condition)
        return (x * self.blocks[0].embed(condition)).square().mean()  # type: ignore[union-attr, operator]


def test_a_part_of_a_block_that_a_step_calls_by_itself_is_refused() -> None:
    with pytest.raises(StepError, match=r"computes with parameters that are sharded .* by pipeline_blocks: "):
        assert_trains_alike(CallsAPart, batches, "dp2")


class Residual(nn.Module):
    """Prepares the input of the layer that it is around, as x-transformers' hyper-connections do."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2), nn.Linear(WIDTH, WIDTH)

    def prepare(self, x: Tensor) -> Tensor:
        return x @ self.before

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return x + self.after(y)


class Prepared(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), Residual()]) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer, residual in self.layers:  # type: ignore[misc]
            x = residual(layer(residual.prepare(x)).tanh(), x)
        return x.square().mean()


def test_a_method_of_a_block_that_reads_its_parameters_is_refused() -> None:
    with pytest.raises(StepError, match=r"or name modules inside of them that are called, by pipeline_blocks: "):
        assert_trains_alike(Prepared, batches, "dp2")


class ReadsItsHead(Prepared):
    """Names on stages what isn't in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).square().mean() + 0.01 * self.head.weight.square().sum()


def named(make: type[Descends], layout: str, *names: str) -> Trains:
    return Trains(make, batches, layout, options={"pipeline_blocks": [*names]})


def test_where_what_runs_in_blocks_is_named_the_rest_is_gathered_for_the_whole_step() -> None:
    layers = [f"layers.{i}" for i in range(4)]
    assert_train_alike(
        {
            "a part that a step calls": named(CallsAPart, "dp2", "blocks.0.layer", "blocks.1.layer"),
            "a method": named(Prepared, "dp2", *(f"{layer}.0" for layer in layers)),
            "modules outside of lists stay readable": named(ReadsItsHead, "pp2", *layers, "head"),
        }
    )
