"""An image classifier: a small vision transformer in an ordinary LightningModule.

Shapes: B batch, P patches, D width, K kinds.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VisionTransformer(nn.Module):
    """Patches to kinds (arXiv:2010.11929), by the mean of the patches' last states."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int, kinds: int) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"size ({size}) must be a multiple of patch ({patch}).")
        self.patches = nn.Conv2d(1, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds)

    def forward(self, images: Tensor) -> Tensor:
        x_BPD = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return self.head(self.norm(x_BPD).mean(1))


class Classifier(L.LightningModule):
    """Trains a vision transformer on images and the number of their kind.

    Args:
        size, patch: Pixels on a side of an image, and of a patch.
        width, layers, heads: Sizes of the transformer.
        kinds: The number of classes.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        *,
        size: int = 32,
        patch: int = 4,
        width: int = 64,
        layers: int = 4,
        heads: int = 4,
        kinds: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = VisionTransformer(size, patch, width, layers, heads, kinds)
        self.example_input_array = torch.zeros(1, 1, size, size)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, kinds_B = batch
        loss = F.cross_entropy(self(images), kinds_B)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        images, kinds_B = batch
        logits_BK = self(images)
        self.log("val_loss", F.cross_entropy(logits_BK, kinds_B), prog_bar=True, sync_dist=True)
        self.log("val_right", (logits_BK.argmax(-1) == kinds_B).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
