"""Steps that call some of the blocks that the stages hold: all is as in one process, and what isn't called stays."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike

WIDTH = 16


class Layers(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number))

    def forward(self, x: Tensor, number: int | None = None) -> Tensor:
        for layer in self.layers[:number]:
            x = x + layer(x)
        return x


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x).tanh()
        return x

    def decode(self, x: Tensor) -> Tensor:
        for layer in self.decoder:
            x = layer(x.tanh())
        return x


class AutoEncoder(L.LightningModule):
    """Trains both of its halves, and predicts with the first, which is its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = Halves()
        self.sizes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net.encode(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net.decode(self(batch)), batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        size = self(batch).square().mean()
        self.log("size", size)
        self.sizes.append(float(size))

    def on_validation_epoch_end(self) -> None:
        self.log("mean_size", sum(self.sizes) / len(self.sizes))
        self.sizes.clear()

    def predict_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        embedded = self(batch)
        return {"embedded": embedded, "norm": embedded.norm(dim=-1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


class EarlyExit(L.LightningModule):
    """Trains the first three layers only, validates with two and predicts with one; a head comes after."""

    configure_optimizers = AutoEncoder.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.net = Layers(5)
        self.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, batch: Tensor, number: int) -> Tensor:
        return F.mse_loss(self.head(self.net(batch, number)), batch.roll(1, -1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, 3)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch, 2)
        self.log("val_loss", loss)
        return loss

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch, 1)).tanh()


class ValidatesAfterTheSanityCheck(EarlyExit):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        if self.trainer.sanity_checking:
            return None
        return super().validation_step(batch, batch_idx)


class ValidatesOneBatch(EarlyExit):
    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        return super().validation_step(batch, batch_idx) if batch_idx == 0 else None


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(
    ("module", "layout"),
    [(AutoEncoder, "pp2"), pytest.param(AutoEncoder, "pp4", marks=pytest.mark.long), (EarlyExit, "pp2 x dp2")],
)
def test_trains_validates_and_predicts_as_one_process_does(module: type[L.LightningModule], layout: str) -> None:
    assert_trains_alike(module, batches, layout, trainer={"gradient_clip_val": 0.1})


def test_evaluations_may_call_no_block() -> None:
    assert_trains_alike(ValidatesAfterTheSanityCheck, batches, "pp2", trainer={"num_sanity_val_steps": 1})


def test_a_later_batch_that_calls_no_block_is_refused() -> None:
    with pytest.raises(StepError, match=r"validation_step didn't call net\.layers\..*its number"):
        assert_trains_alike(ValidatesOneBatch, batches, "pp2")
