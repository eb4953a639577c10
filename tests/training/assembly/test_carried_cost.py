"""Blocks are those that carry the cost."""

from __future__ import annotations

import lightning as L
import pytest
from torch import Tensor, nn

from lightning_shard.errors import PlacementError
from lightning_shard.parallel.blocks import find_blocks
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.plugin.assembly.placing import costs_of
from tests.training.models.unets import Diffusion, OfLists, Towers


def cut(module: L.LightningModule, stages: int = 2) -> Placement:
    """The placement that a run would have."""
    _, cost = costs_of(module, find_blocks(module), runs=True)
    return place(cost, stages)


def test_a_unet_is_cut_between_its_levels_and_not_along_its_embedding_of_time() -> None:
    for module, levels in (
        (Diffusion(), ["down1", "down2", "up1", "up2"]),
        (Diffusion(OfLists), ["down.0", "down.1", "middle", "up.0", "up.1"]),
    ):
        assert find_blocks(module).names == tuple(f"unet.{level}" for level in levels)
        parameters = [stage.parameters for stage in cut(module).stages]
        assert min(parameters) > 0.3 * sum(parameters)


def test_two_networks_that_a_step_calls_once_each_are_both_cut() -> None:
    towers = [*(f"image.blocks.{i}" for i in range(3)), *(f"text.layers.{i}" for i in range(3))]
    assert find_blocks(Towers()).names == tuple(towers)
    assert cut(Towers(), 4).stages[-1].names[0].startswith("text.layers")


class Parts(nn.Module):
    """Three modules that the code calls one after the other, or in a loop."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))


class Looped(Parts):
    def __init__(self) -> None:
        super().__init__(32)
        self.small = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second, self.third):
            x = part(x)
        return x + self.small(x[..., :4]).sum()


class Stepping(L.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.network(batch).sum()


def test_modules_that_the_source_calls_once_each_are_cut_between_without_a_list() -> None:
    assert find_blocks(Stepping(Parts())).names == ("network.first", "network.second", "network.third")
    looped = Looped()
    del looped.small
    with pytest.raises(PlacementError, match=r"such as \['network.first', 'network.second', 'network.third'\] if"):
        find_blocks(Stepping(looped))
