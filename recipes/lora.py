"""Adapters by peft on a transformers model of a folder: an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from causal import CausalLM


class LoraLM(CausalLM):
    """Trains low-rank adapters of a model that stays frozen (LoRA, arXiv:2106.09685).

    Args:
        path: The folder of the transformers model. Each process reads all of it before it keeps its part.
        rank: Of the adapters.
        modules: What layers that get an adapter are called, such as ``["q_proj", "v_proj"]``. Default: peft's choice
            for the kind of model.
        learning_rate, weight_decay: AdamW's.
    """

    def __init__(
        self,
        path: str,
        *,
        rank: int = 8,
        modules: Sequence[str] | None = None,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(None, learning_rate, weight_decay)
        self.save_hyperparameters()

    def configure_model(self) -> None:
        if self.model is None:
            from peft import LoraConfig, get_peft_model
            from transformers import AutoModelForCausalLM

            modules = self.hparams["modules"]
            adapters = LoraConfig(
                r=self.hparams["rank"],
                lora_alpha=2 * self.hparams["rank"],
                target_modules=list(modules) if modules else None,
            )
            whole = AutoModelForCausalLM.from_pretrained(self.hparams["path"], dtype=torch.float32)
            self.model = get_peft_model(whole, adapters)
