"""LightningModules whose networks are written in ways that a cut between blocks has to see through."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shard.testing import assert_trains_alike

WIDTH = 16


class Autoencoder(L.LightningModule):
    """Its forward is the encoder, as in Lightning's own example, and the decoder's layers are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 6)
        self.decoder = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        code = self(batch)
        self.log("norm", code.norm(dim=-1).mean())
        loss = F.mse_loss(self.decoder(code), batch) + 0.1 * code.abs().mean()
        return {"loss": loss, "code": code.detach()}

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        code = self(batch)
        return self.decoder(code) + code.mean(-1, keepdim=True)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def vectors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2 x dp2", marks=pytest.mark.long)])
def test_forward_may_be_the_encoder_before_blocks_that_the_step_calls(layout: str) -> None:
    assert_trains_alike(Autoencoder, vectors, layout)


class Convolved(nn.Module):
    """With a norm whose statistics are ``None``."""

    def __init__(self, channels: int, others: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(channels, others, 3, padding=1)
        self.norm = nn.InstanceNorm1d(others, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)))


class Level(nn.Module):
    def __init__(self, down: nn.Module, inner: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.inner, self.up = down, inner, up

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.up(torch.cat([self.inner(y), y], 1))  # type: ignore[no-any-return]


class Unet(L.LightningModule):
    """Registers its blocks twice, as MONAI's DynUNet does: in lists, and in the levels that call them."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([Convolved(WIDTH, 8), Convolved(8, 8)])
        self.bottleneck = Convolved(8, 8)
        self.ups = nn.ModuleList([Convolved(16, 8), Convolved(16, 8)])
        self.out = nn.Conv1d(8, WIDTH, 1)
        self.levels = Level(self.downs[0], Level(self.downs[1], self.bottleneck, self.ups[0]), self.ups[1])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[:, :, None] * torch.linspace(1, 2, 8)
        return F.mse_loss(self.out(self.levels(x)), x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_blocks_may_be_registered_twice_with_norms_without_statistics() -> None:
    assert_trains_alike(Unet, vectors, "pp2")
