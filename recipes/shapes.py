"""Images of circles, squares, triangles and crosses at random places, drawn when they are read; nothing to download."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

KINDS = ("circle", "square", "triangle", "cross")


class Drawn(Dataset[tuple[Tensor, int]]):
    """``count`` grey images of ``[1, size, size]`` from -1 to 1, with the number of their kind.

    Args:
        seed: Of all images: the one at an index is always the same.
        noise: The standard deviation of each pixel's noise.
    """

    def __init__(self, count: int, size: int, seed: int, noise: float) -> None:
        self.count, self.size, self.seed, self.noise = count, size, seed, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        kind = index % len(KINDS)
        radius, middle_x, middle_y = (torch.rand(3, generator=draws) * 0.4 + 0.3).tolist()
        line = torch.linspace(0, 1, self.size)
        x, y = (line[None] - middle_x) / radius * 2, (line[:, None] - middle_y) / radius * 2
        inside = (
            x.square() + y.square() < 1,
            torch.maximum(x.abs(), y.abs()) < 0.9,
            (y < 0.8) & (y > 2 * x.abs() - 1),
            (torch.minimum(x.abs(), y.abs()) < 0.25) & (torch.maximum(x.abs(), y.abs()) < 1),
        )[kind]
        image = inside.float() * 2 - 1 + self.noise * torch.randn(self.size, self.size, generator=draws)
        return image[None], kind


class Shapes(L.LightningDataModule):
    """Batches of images and kinds.

    Args:
        size: Pixels on a side.
        batch_size: Images per data-parallel rank.
        images, held_out: How many there are to train on, and to validate on.
        noise: As of :class:`Drawn`.
        num_workers: DataLoader workers.
    """

    def __init__(
        self,
        *,
        size: int = 32,
        batch_size: int = 32,
        images: int = 8192,
        held_out: int = 256,
        noise: float = 0.1,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
        self.train, self.held_out = Drawn(images, size, 0, noise), Drawn(held_out, size, 1, noise)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(self.held_out, self.batch_size, num_workers=self.num_workers)
