"""A small GPT over bytes: an ordinary network in an ordinary LightningModule, without any code for parallelism.

Shapes: B batch, T tokens, D width, H heads, W width of a head, V vocabulary.
"""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width ({width}) must be a multiple of heads ({heads}).")
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        # The number of heads follows from the projection's width: under tensor parallelism a rank has some of them.
        query_BHTW, key_BHTW, value_BHTW = (
            project(x_BTD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed_BHTW = F.scaled_dot_product_attention(query_BHTW, key_BHTW, value_BHTW, is_causal=True)
        return self.output(mixed_BHTW.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width, 4 * width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 256, width: int = 128, layers: int = 4, heads: int = 4, context: int = 128
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.draw_weights()

    def draw_weights(self) -> None:
        """Initialize as in GPT-2: projections into the residual stream are scaled down by √(2 × layers)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                added = name.endswith(("attention.output.weight", "mlp.down.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if added else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.size(1), device=tokens_BT.device)
        x_BTD = self.token_embedding(tokens_BT) + self.position_embedding(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class LanguageModel(L.LightningModule):
    """Trains a GPT to predict the next token.

    Args:
        vocabulary, width, layers, heads, context: Sizes of the network.
        learning_rate: The peak learning rate.
        warmup_steps: Optimizer steps in which the learning rate rises linearly; then it decays to a tenth by a cosine
            until the last step.
        weight_decay: For matrices; norms aren't decayed.
        sample: Tokens that each validation continues a held-out text by, and prints; 0: none.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 256,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        context: int = 128,
        learning_rate: float = 1e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
        sample: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(vocabulary, width, layers, heads, context)
        self.sampled_T = torch.zeros(sample, dtype=torch.long)
        self.example_input_array = torch.zeros(1, context, dtype=torch.long)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(tokens_BT)

    def loss(self, window_BT: Tensor) -> Tensor:
        """Cross entropy in nats per token; each token of the window but the first is predicted from those before it."""
        logits_BTV = self.model(window_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), window_BT[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)
        if batch_index == 0 and self.hparams["sample"]:
            self.sampled_T = self.continued(batch[:1, :-1], self.hparams["sample"])[0]

    def continued(self, tokens_BT: Tensor, count: int) -> Tensor:
        """The likeliest next ``count`` tokens, one after another: ``[batch, count]``."""
        context = tokens_BT.size(1)
        for _ in range(count):
            likeliest_B1 = self.model(tokens_BT[:, -context:])[:, -1:].argmax(-1)
            tokens_BT = torch.cat([tokens_BT, likeliest_B1], 1)
        return tokens_BT[:, -count:]

    def on_validation_epoch_end(self) -> None:
        if len(self.sampled_T):
            self.print(f"sample: {bytes(self.sampled_T.tolist())!r}")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.hparams["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer = AdamW(groups, lr=self.hparams["learning_rate"], betas=(0.9, 0.95))
        warmup, total = self.hparams["warmup_steps"], self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
