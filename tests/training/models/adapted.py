"""transformers' models with what people put on them: adapters by peft, a head, a loss over the batch or its experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, VOCABULARY, CLASSES = 32, 32, 10
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 4}
_BERT: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


class Answers(Logits):
    """Of an encoder–decoder, which also is given what it has said so far."""

    def forward(self, tokens: Tensor, said: Tensor) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=tokens, decoder_input_ids=said).logits


def _lora(model: nn.Module, modules: list[str]) -> nn.Module:
    import peft

    wanted = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=modules, init_lora_weights=False)
    return peft.get_peft_model(model, wanted)  # type: ignore[arg-type]


def lora_llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=4, **_TOKENS, **_SIZES)
    return Logits(_lora(transformers.LlamaForCausalLM(config), ["q_proj", "v_proj"]))


def lora_gpt2() -> nn.Module:
    import transformers

    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(n_embd=WIDTH, n_layer=4, n_head=4, n_positions=32, **_TOKENS, **no_dropout)
    return Logits(_lora(transformers.GPT2LMHeadModel(config), ["c_attn"]))


def lora_t5() -> nn.Module:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return Answers(_lora(transformers.T5ForConditionalGeneration(config), ["q", "v"]))


class Llava(nn.Module):
    """Four vectors of an image before the text."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        seen = transformers.CLIPVisionConfig(
            **_SIZES, num_hidden_layers=4, image_size=16, patch_size=8, projection_dim=16
        )
        said = transformers.LlamaConfig(num_hidden_layers=4, **_TOKENS, **_SIZES)
        config = transformers.LlavaConfig(
            vision_config=seen, text_config=said, image_token_index=VOCABULARY - 1, vision_feature_layer=-1
        )
        self.model = transformers.LlavaForConditionalGeneration(config)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        text = torch.where(tokens == VOCABULARY - 1, 3, tokens)
        both = F.pad(text, (4, 0), value=VOCABULARY - 1)
        return self.model(pixel_values=images, input_ids=both).logits[:, 4:]


class BertWithAHead(nn.Module):
    """A classifier on what the first token became."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        self.bert = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **_BERT))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=tokens).pooler_output)


class Contrastive(nn.Module):
    """Two towers; each image's text is told apart from those of the other samples."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        image = transformers.ViTConfig(image_size=16, patch_size=8, **{**_BERT, "num_hidden_layers": 4})
        self.image = transformers.ViTModel(image, add_pooling_layer=False)
        self.text = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **_BERT))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        image = F.normalize(self.image(pixel_values=images).last_hidden_state[:, 0], dim=-1)
        text = F.normalize(self.text(input_ids=tokens).pooler_output, dim=-1)
        scores = self.temperature.exp() * image @ text.T
        which = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, which) + F.cross_entropy(scores.T, which)) / 2


class Clip(nn.Module):
    def __init__(self) -> None:
        import transformers

        super().__init__()
        tower = {**_SIZES, "num_hidden_layers": 4}
        config = transformers.CLIPConfig(
            text_config={**tower, **_TOKENS, "max_position_embeddings": 32},
            vision_config={**tower, "image_size": 16, "patch_size": 8},
            projection_dim=WIDTH,
        )
        self.clip = transformers.CLIPModel(config)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        return self.clip(pixel_values=images, input_ids=tokens, return_loss=True).loss


class Balanced(nn.Module):
    """A mixture whose loss balances its experts by the router's scores of all blocks."""

    def __init__(self) -> None:
        import transformers

        super().__init__()
        sizes = {**_SIZES, **_TOKENS, "num_key_value_heads": 2, "num_hidden_layers": 4, "num_local_experts": 4}
        config = transformers.MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.5, **sizes)
        self.model = transformers.MixtralForCausalLM(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=labels).loss
