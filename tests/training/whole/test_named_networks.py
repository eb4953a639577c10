"""The networks that people bring first, on layouts of four ranks: alike with one process.

The layouts of two ranks are ``docs/models.md``'s. Everything here is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from lightning_shard.testing import assert_trains_alike, preload
from tests.training.models import networks

preload("tests.training.whole.test_named_networks", "lightning_shard.testing.recorder")

pytestmark = pytest.mark.long
BATCH, STEPS, LENGTH, VOCABULARY = 16, 2, 12, 64
LAYOUTS = ("pp4", "pp2 x dp2", "pp2 x tp2")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ALBERT = {"embedding_size": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BALANCED = "Mixtral with its load-balancing loss"


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, **sizes))


def t5() -> nn.Module:
    layers = {"num_layers": 4, "num_decoder_layers": 4, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 64}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **layers, **ends))


def balanced() -> nn.Module:
    config = hf.MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=1.0)
    return hf.MixtralForCausalLM(config)


TEXT: dict[str, Callable[[], nn.Module]] = {
    "tied GPT-2": gpt2,
    "tied Gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES, head_dim=8)),
    "tied Qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
    "ALBERT": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SIZES, **ALBERT)),
    "T5": t5,
    BALANCED: balanced,
}
OTHERS = (
    "nn.Sequential, convolutions (VGG)",
    "nn.TransformerEncoder",
    "ResNet with GroupNorm",
    "backbone, head on the LightningModule",
    "diffusion transformer",
    "Llama with LoRA (peft)",
    "LLaVA, images and text",
)
NAMES = (*TEXT, *OTHERS)
TENSOR_PARALLEL = {"tied Qwen3", BALANCED, "nn.TransformerEncoder", "Llama with LoRA (peft)"}  # tied Gemma: refused


class Language(L.LightningModule):
    """A transformers model with its own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model = TEXT[kind]()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        # the load-balancing loss isn't a mean over samples: it is taken of as many as a microbatch has
        texts = tokens.split(2) if self.kind == BALANCED else [tokens]
        loss = torch.stack([self.model(input_ids=text, labels=text).loss for text in texts]).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make(name: str) -> L.LightningModule:
    return Language(name) if name in TEXT else networks.make(name)


def batches(name: str) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        if name in TEXT:
            yield torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
        else:
            parts = [[draw(generator) for draw in networks.NETWORKS[name].batch] for _ in range(2)]
            yield tuple(torch.cat(both) for both in zip(*parts))


def settings(name: str, layout: str) -> dict[str, Any]:
    """A microbatch has two samples on every layout."""
    chosen: dict[str, Any] = {"microbatches": 4 if "dp2" in layout else 8}
    if "tp2" in layout and name in networks.NETWORKS and networks.NETWORKS[name].plan is not None:
        chosen["tensor_parallel_plan"] = networks.NETWORKS[name].plan
    return chosen


CASES = [(name, layout) for name in NAMES for layout in LAYOUTS if "tp2" not in layout or name in TENSOR_PARALLEL]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_network_trains_alike(name: str, layout: str) -> None:
    makers = partial(make, name), partial(batches, name)
    assert_trains_alike(*makers, [layout], steps=STEPS, **settings(name, layout))
