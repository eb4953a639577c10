"""Parameters that a step uses on another stage than their own: as on one process, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.testing.test_trains_alike import WIDTH, Block, Module, Network, batches

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}


class Scaling(Block):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Scaled(Network):
    """Has a parameter of its own, of which it gives blocks of both stages a product."""

    def __init__(self) -> None:
        super().__init__(Scaling)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.scale * 1.1)
        return self.head(x)


class ScaledModule(Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Scaled()


class PenalisesABlock(Module):
    def loss(self, tokens: Tensor) -> Tensor:
        weight: Tensor = self.network.blocks[1].get_submodule("up").weight  # type: ignore[assignment]
        return super().loss(tokens) + 0.1 * weight.square().sum()


def test_a_parameter_of_the_network_itself_is_used_on_all_stages() -> None:
    """What a stage receives in its place was taken for an attribute that the step changes late, and refused."""
    assert_trains_alike(ScaledModule, batches, {**STAGES, "schedule": "Interleaved1F1B"}, steps=2)


@pytest.mark.long
def test_another_stages_block_is_used_where_one_rank_holds_it() -> None:
    """It was refused in the second batch, as what depends on a batch's values."""
    assert_trains_alike(PenalisesABlock, batches, STAGES, steps=2)


def test_where_several_hold_parts_of_it_it_is_refused_by_name() -> None:
    with pytest.raises(StepError, match=r"network\.blocks\.1\.up\.weight, of stage 0, is used on a later .* in parts"):
        assert_trains_alike(PenalisesABlock, batches, {**STAGES, "data_parallel_size": 2})
