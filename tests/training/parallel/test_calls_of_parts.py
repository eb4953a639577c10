"""Parts of sharded blocks that a step calls by themselves, as diffusers' DiT does for its conditioning."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike

WIDTH = 8


class Embedding(nn.Module):
    """Two layers, so that its backward needs a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = Embedding(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return x + self.layer(x * self.embed(condition)).tanh()


class Module(L.LightningModule):
    """Calls a part of its first block: before the blocks, after them, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = True, True

    def forward(self, x: Tensor) -> Tensor:
        condition, part = x.roll(1, -1), self.blocks[0].embed  # type: ignore[union-attr]
        if self.before:
            x = x + part(condition)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x * part(condition) if self.after else x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch), batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch), batch), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Before(Module):
    def __init__(self) -> None:
        super().__init__()
        self.after = False


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        loss = F.mse_loss(self(batch), batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)


class Late(Module):
    """Calls the part in its second step for the first time."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.before = self.after = batch_idx > 0
        return super().training_step(batch, batch_idx)


def batches() -> list[Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


@pytest.mark.parametrize("kind", [Module, *(pytest.param(kind, marks=pytest.mark.long) for kind in (Before, ByHand))])
def test_a_part_that_a_step_calls_gathers_its_block(kind: Any) -> None:
    both = [{"data_parallel_size": 2, "reshard_after_forward": reshards} for reshards in (True, False)]
    assert_trains_alike(kind, batches, both)


@pytest.mark.parametrize(
    ("layout", "settings", "trainer"),
    [
        ("dp2", {"activation_checkpointing": True}, {"accumulate_grad_batches": 2}),
        pytest.param("dp2", {"cpu_offload": True}, {}, marks=pytest.mark.long),
        pytest.param("pp2 x dp2", {"reshard_after_forward": True}, {}, marks=pytest.mark.long),
    ],
)
def test_with_other_settings(layout: str, settings: dict[str, Any], trainer: dict[str, Any]) -> None:
    kind = Before if "pp" in layout else Module  # the last stage doesn't hold the first block
    assert_trains_alike(kind, batches, [layout], trainer=trainer, **settings)


def test_a_part_that_no_first_step_calls_is_refused() -> None:
    with pytest.raises(StepError, match="computes with parameters that are sharded"):
        assert_trains_alike(Late, batches, ["dp2"])


class Residual(nn.Module):
    """Prepares the input of the layer that it is around, as x-transformers' hyper-connections do."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2), nn.Linear(WIDTH, WIDTH)

    def prepare(self, x: Tensor) -> Tensor:
        return x @ self.before

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return x + self.after(y)


class Prepared(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, WIDTH), Residual()]) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer, residual in self.layers:  # type: ignore[misc]
            x = residual(layer(residual.prepare(x)).tanh(), x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_of_blocks_whose_modules_are_named_the_others_are_gathered_for_the_whole_step() -> None:
    with pytest.raises(StepError, match=r"Or name modules inside of them that are called, by pipeline_blocks: "):
        assert_trains_alike(Prepared, batches, "dp2")
    assert_trains_alike(Prepared, batches, "dp2", pipeline_blocks=[f"layers.{i}.0" for i in range(4)])


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


def test_named_modules_outside_of_lists_stay_readable() -> None:
    names = [*(f"layers.{i}" for i in range(4)), "head"]
    assert_trains_alike(ReadsItsHead, batches, ["pp2"], pipeline_blocks=names)
