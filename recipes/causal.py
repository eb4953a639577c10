"""An ordinary LightningModule for any causal language model of transformers, built from its configuration alone."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F


class CausalLM(L.LightningModule):
    """Trains a transformers model to predict the next token.

    Args:
        config: The model's configuration, such as ``transformers.GPTNeoXConfig``. The model itself is built in
            ``configure_model`` on the meta device, so that no process ever holds all of it.
        learning_rate: AdamW's learning rate.
        weight_decay: AdamW's weight decay.
    """

    def __init__(self, config: Any, learning_rate: float = 1e-4, weight_decay: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["config"])
        self.config = config
        self.model: Any = None
        self.example_input_array = torch.zeros(1, 8, dtype=torch.long)

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForCausalLM

            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(self.config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.model(input_ids=tokens_BT, use_cache=False).logits

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Cross entropy in nats per token; each token of the window but the first is predicted from those before it."""
        logits_BTV = self(tokens_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_index: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learned = [parameter for parameter in self.parameters() if parameter.requires_grad]
        rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
        return torch.optim.AdamW(learned, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
