"""Unmodified transformers models of many kinds, cut into two stages, compute what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, like_llama

BATCH, MICROBATCHES = 16, 4

LIKE_LLAMA: dict[str, Any] = {**like_llama(), "pad_token_id": 0}
LIKE_BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
BALANCED = "mixtral with its load-balancing loss"
BESIDE = "a head and a temperature beside bert"
HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
TIED: dict[str, Any] = {"vocab_size": 64}  # as most are by default
FOUR_LAYERS: dict[str, Any] = {**TIED, "num_hidden_layers": 4, "max_position_embeddings": 32}


def recomputing(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable()
    return model


SMALL: dict[str, Any] = {"d_model": 32, "vocab_size": 64, "decoder_start_token_id": 0, "pad_token_id": 0}

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in HALF.items()}, dropout=0.0, **SMALL
        )
    ),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**LIKE_BERT, **TIED)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(hidden_size=32, n_layer=4, n_head=4, **TIED)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**LIKE_LLAMA, "tie_word_embeddings": True}, head_dim=8)),
    "llama that recomputes": lambda: recomputing(hf.LlamaForCausalLM(hf.LlamaConfig(**LIKE_LLAMA))),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**LIKE_LLAMA)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LIKE_LLAMA, num_local_experts=4)),
    BALANCED: lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**LIKE_LLAMA, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0)
    ),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_attention_heads=4, dropout=0.0, **FOUR_LAYERS
        )
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**LIKE_LLAMA, "tie_word_embeddings": True})),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**LIKE_LLAMA)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0, **SMALL)
    ),
    BESIDE: lambda: hf.BertModel(hf.BertConfig(**LIKE_BERT, **TIED)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**LIKE_BERT, image_size=8, patch_size=4, num_labels=64)),
}


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.kind = kind
        self.model = NETWORKS[kind]()
        if kind == BESIDE:
            self.head = nn.Linear(32, 64)
            self.temperature = nn.Parameter(torch.full((1,), 0.7))

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        if self.kind == "vit":
            pixels = tokens.float().reshape(len(tokens), 3, 8, 8) / 64
            loss = self.model(pixel_values=pixels, labels=tokens[:, 0]).loss
        elif self.kind == BESIDE:
            hidden = self.model(input_ids=tokens[:, :12]).last_hidden_state
            loss = F.cross_entropy((self.head(hidden) * self.temperature).flatten(0, 1), tokens[:, 1:13].flatten())
        else:
            # the load-balancing loss isn't a mean over samples: in one process, on the microbatches too
            alone = self.kind == BALANCED and len(tokens) == BATCH
            texts = tokens[:, :12].contiguous().chunk(MICROBATCHES if alone else 1)
            loss = torch.stack([self.model(input_ids=text, labels=text).loss for text in texts]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def train_all(stages: int, folder: Path) -> dict[str, list[float]]:
    losses = {}
    for kind in NETWORKS:
        L.seed_everything(3)
        strategy: Any = HybridShardStrategy(pipeline_parallel_size=stages) if stages > 1 else "auto"
        recorder = Losses()
        trainer = L.Trainer(strategy=strategy, devices=stages, max_steps=3, callbacks=[recorder], **QUIET)
        tokens = torch.randint(1, 64, (48, 192), generator=torch.Generator().manual_seed(2))
        module = Module(kind)
        trainer.fit(module, DataLoader(tokens, batch_size=BATCH))
        losses[kind] = recorder.seen
        if stages > 1:
            trainer.save_checkpoint(folder / kind)
        else:
            torch.save(module.state_dict(), folder / f"{kind}.pt")
    return losses


@pytest.mark.long
def test_two_stages_of_every_kind_compute_and_save_what_one_process_does(tmp_path: Path) -> None:
    plain = train_all(1, tmp_path)
    assert all(losses[2] != losses[0] for losses in plain.values())  # they train
    for losses in run_ranks(train_all, 2, 2, tmp_path, elastic=True, timeout_s=120):
        for kind, expected in plain.items():
            assert losses[kind] == pytest.approx(expected, rel=1e-5), kind
    for kind in NETWORKS:
        state = torch.load(tmp_path / f"{kind}.pt")
        saved = checkpoint.read(tmp_path / kind)
        for name, expected_value in state.items():
            assert torch.allclose(saved[name].full(), expected_value, atol=1e-5), (kind, name)
