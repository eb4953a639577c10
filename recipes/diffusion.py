"""A diffusion model of images: a small UNet in an ordinary LightningModule.

Shapes: B batch, C channels, H × W pixels, D width of the embedding of the noise's level.
"""

from __future__ import annotations

import math

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Two convolutions, of which the second knows the noise's level."""

    def __init__(self, channels: int, out: int, embedded: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.level = nn.Linear(embedded, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.around = nn.Conv2d(channels, out, 1)

    def forward(self, x_BCHW: Tensor, level_BD: Tensor) -> Tensor:
        between_BCHW = self.first(x_BCHW) + self.level(level_BD)[:, :, None, None]
        return self.around(x_BCHW) + self.second(between_BCHW)


class UNet(nn.Module):
    """The noise in an image: halved in size and widened twice, and back, with what was seen on the way down."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.embedded = 4 * channels
        self.enter = nn.Conv2d(1, channels, 3, padding=1)
        widths = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(Residual(a, b, self.embedded) for a, b in zip([channels, *widths], widths))
        self.middle = Residual(widths[-1], widths[-1], self.embedded)
        after = [widths[-1], *reversed(widths)]
        self.up = nn.ModuleList(Residual(a + b, b, self.embedded) for a, b in zip(after, reversed(widths)))
        self.leave = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 1, 3, padding=1))

    def forward(self, images: Tensor, level_B: Tensor) -> Tensor:
        powers = torch.exp(torch.arange(self.embedded // 2, device=images.device) * (-8 / (self.embedded // 2)))
        angles_BD = 1000 * level_B[:, None] * powers
        level_BD = torch.cat([angles_BD.sin(), angles_BD.cos()], 1)
        x, seen = self.enter(images), []
        for block in self.down:
            x = block(x, level_BD)
            seen.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, level_BD)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), seen.pop()], 1), level_BD)
        return self.leave(x)


class Diffusion(L.LightningModule):
    """Trains a UNet to predict the noise that was added to images (DDPM, arXiv:2006.11239; the cosine schedule).

    Args:
        channels: Of the first blocks, a multiple of 8.
        size: Pixels on a side, a multiple of 8.
        learning_rate: AdamW's.
    """

    def __init__(self, *, channels: int = 16, size: int = 32, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = UNet(channels)
        self.example_input_array = (torch.zeros(1, 1, size, size), torch.zeros(1))

    def forward(self, images: Tensor, level_B: Tensor) -> Tensor:
        return self.model(images, level_B)

    def loss(self, images: Tensor) -> Tensor:
        level_B = torch.rand(len(images), device=images.device)
        noise = torch.randn_like(images)
        angle = level_B[:, None, None, None] * math.pi / 2
        return F.mse_loss(self(angle.cos() * images + angle.sin() * noise, level_B), noise)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        loss = self.loss(batch[0])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        self.log("val_loss", self.loss(batch[0]), prog_bar=True, sync_dist=True)

    @torch.no_grad()
    def sample(self, count: int, steps: int = 50) -> Tensor:
        """Images of ``[count, 1, size, size]`` from noise, without noise of its own (DDIM, arXiv:2010.02502)."""
        size = self.hparams["size"]
        x = torch.randn(count, 1, size, size, device=self.device)
        angles = torch.linspace(math.pi / 2, 0, steps + 1)[:-1].tolist()
        for angle, to in zip(angles, [*angles[1:], 0.0]):
            noise = self(x, torch.full((count,), angle * 2 / math.pi, device=self.device))
            image = ((x - math.sin(angle) * noise) / max(math.cos(angle), 0.05)).clamp(-1, 1)
            x = math.cos(to) * image + math.sin(to) * noise
        return x

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
