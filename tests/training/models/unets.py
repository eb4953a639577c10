"""U-Nets whose levels are conditioned on the time, written in the two usual ways; and a pair of towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training.parallel.small import Descends

Batch = tuple[Tensor, ...]
WIDTH, TIME = 8, 32


class Level(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.into, self.conv = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(4, out), nn.Linear(TIME, out)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(self.into(x)) + self.time(time)[:, :, None, None]))


class Attending(Level):
    """A level of another class, as the deeper ones of diffusers' U-Nets."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out)
        self.attention = nn.MultiheadAttention(out, 2, batch_first=True)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = super().forward(x, time)
        y = x.flatten(2).transpose(1, 2)
        return x + self.attention(y, y, y, need_weights=False)[0].transpose(1, 2).view_as(x)


def embedding() -> nn.Module:
    return nn.Sequential(nn.Linear(1, TIME), nn.SiLU(), nn.Linear(TIME, TIME))


class OfAttributes(nn.Module):
    """Its levels are attributes; the embedding of the time is its only list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.into, self.out = embedding(), nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 1)
        self.down1, self.down2 = Level(WIDTH, 2 * WIDTH), Attending(2 * WIDTH, 4 * WIDTH)
        self.up1, self.up2 = Attending(6 * WIDTH, 2 * WIDTH), Level(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time = self.time(time[:, None])
        skip = self.into(x)
        skip1 = self.down1(F.avg_pool2d(skip, 2), time)
        x = self.down2(F.avg_pool2d(skip1, 2), time)
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0), skip1], 1), time)
        return self.out(self.up2(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1), time))


class OfLists(nn.Module):
    """As diffusers': its levels are in lists of unlike classes, with skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.into, self.out = embedding(), nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 1)
        self.down = nn.ModuleList([Level(WIDTH, 2 * WIDTH), Attending(2 * WIDTH, 4 * WIDTH)])
        self.middle = Attending(4 * WIDTH, 4 * WIDTH)
        self.up = nn.ModuleList([Attending(8 * WIDTH, 2 * WIDTH), Level(4 * WIDTH, WIDTH)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time, x, skips = self.time(time[:, None]), self.into(x), []
        for level in self.down:
            x = level(F.avg_pool2d(x, 2), time)
            skips.append(x)
        x = self.middle(x, time)
        for level in self.up:
            x = F.interpolate(level(torch.cat([x, skips.pop()], 1), time), scale_factor=2.0)
        return self.out(x)


class Trained(Descends):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: Batch) -> Tensor:
        raise NotImplementedError


class Diffusion(Trained):
    def __init__(self, network: type[nn.Module] = OfAttributes) -> None:
        super().__init__()
        self.unet = network()

    def loss(self, batch: Batch) -> Tensor:
        image, noise, time = batch
        return F.mse_loss(self.unet(image + noise, time), noise)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 24)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 64, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(24, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Towers(Trained):
    """CLIP with its two towers on the LightningModule itself."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = Images(), Texts(), nn.Parameter(torch.tensor(1.0))

    def loss(self, batch: Batch) -> Tensor:
        image, tokens = batch
        scores = self.scale.exp() * F.normalize(self.image(image), dim=-1) @ F.normalize(self.text(tokens), dim=-1).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def noisy_images() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    shape = (8, 3, 8, 8)
    return [(*(torch.randn(shape, generator=generator) for _ in range(2)), torch.rand(8, generator=generator))] * 2


def pairs() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    images, tokens = torch.randn((8, 3, 8, 8), generator=generator), torch.randint(64, (8, 6), generator=generator)
    return [(images, tokens)] * 2
