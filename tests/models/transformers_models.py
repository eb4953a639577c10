"""transformers' architectures, each as small as its configuration lets it be, with batches that it takes."""

from __future__ import annotations

import math
import pickle
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.networks import EPSILON
from tests.models.overrides import CLASSES, VOCABULARY, Input, override

SAMPLES, STEPS, LENGTH = 8, 2, 12
MOST_PARAMETERS = 6_000_000
MOST_MEMORY_BYTES = 12 << 30

FAMILIES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder–decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image and text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Families of one task, in the order in which a class of several is counted."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "n_embed", "embedding_dim", "conv_dim_last"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("ffn_hidden_size", "inner_dim", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "depth"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "decoder_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_size", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "state_size", "d_conv_state"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "n_ctx"), VOCABULARY),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "context_length"), VOCABULARY),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_num_heads", "mamba_head_dim"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "attn_layer_indices": [1, 3],
    "rotary_dim": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_length": 32,
    "num_labels": CLASSES,
    "conv_dim": (32, 32),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "apply_spec_augment": False,
    "ctc_loss_reduction": "mean",
}
_STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("hidden_sizes", "embed_dims"), (16, 32, 48, 64, 64)),
    "depths": (1, 2, 2, 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (2, 4, 4, 8)),
}
"""Of networks in stages, of as many as they have."""
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": None},
    {"head_dim": None},
    {"num_key_value_heads": None, "head_dim": None},
    {"head_dim": 16},
    {"patch_size": None, "image_size": None},
    {"intermediate_size": None, "head_dim": None, "num_key_value_heads": None},
    dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "head_dim")),
    dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "num_hidden_layers", "head_dim")),
    _STAGES,
)
"""What else is tried, in this order: some architectures need sizes that fit each other. ``None`` is the default."""


class NotBuilt(Exception):
    """No small model of this architecture was found; says why the last attempt failed."""


class Model(L.LightningModule):
    """As a user's: it knows of no layout."""

    def __init__(self, architecture: str, config: Any, joined: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = class_of(architecture)(config)
        self.model.train()
        self.joined = joined

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self(batch)
        return output.logits if "logits" in output else output[0]

    def forward(self, batch: dict[str, Tensor]) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "target"}
        return self.model(**inputs | {name: inputs[name].flatten(0, 1) for name in self.joined})

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        output = self(batch)
        if "loss" in output:
            return output.loss
        return F.cross_entropy(output[0], batch["target"] if "target" in batch else batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3, eps=EPSILON)


@dataclass(frozen=True)
class Found:
    """A small model that runs on one process: its pickled configuration and what its batches are."""

    config: bytes
    inputs: Mapping[str, Input]
    parameters: int


def architectures() -> dict[str, tuple[str, str, str]]:
    """By class: family, model type and class, each class once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str, str]] = {}
    for family, mapping in FAMILIES.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (family, model_type, name))
    return found


def find_small(family: str, model_type: str, architecture: str) -> Found:
    """Try sizes until a model is small and its loss is a number.

    Raises:
        NotBuilt: None did.
    """
    bound_memory()
    first: Exception | None = None  # of the most usual sizes
    kind = class_of(architecture).config_class or _config_class(model_type)
    own = override(architecture, model_type)
    for variant in _VARIANTS:
        try:
            config = _small(kind, {**_SIZES, **variant}, own.config)
            return _try(architecture, config, lambda model: {**_inputs(family, model), **own.inputs})
        except Exception as error:
            first = first or error
    raise NotBuilt(f"{type(first).__name__}: {first}") from first


def make(architecture: str, found: Found) -> Model:
    bound_memory()
    joined = tuple(name for name, each in found.inputs.items() if each.joined)
    return Model(architecture, pickle.loads(found.config), joined)


def batches(found: Found, steps: int = STEPS) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        yield {name: _tensor(each, generator) for name, each in found.inputs.items()}


def _tensor(each: Input, generator: torch.Generator) -> Tensor:
    if each.same is not None:
        return torch.tensor(each.same).expand(SAMPLES, *each.shape).clone()
    if not each.end:
        return torch.randn((SAMPLES, *each.shape), generator=generator)
    numbers = torch.randint(3, each.end, (SAMPLES, *each.shape), generator=generator).squeeze()
    numbers[..., : len(each.first)] = torch.tensor(each.first, dtype=torch.long)
    return numbers


def bound_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def makers(architecture: str, found: Found) -> tuple[Any, Any]:
    return partial(make, architecture, found), partial(batches, found)


def _try(architecture: str, config: Any, inputs: Callable[[Any], Mapping[str, Input | None]]) -> Found:
    with torch.device("meta"):
        meta = class_of(architecture)(config)
    size = sum(parameter.numel() for parameter in meta.parameters())
    if size > MOST_PARAMETERS:
        raise NotBuilt(f"{size:,} parameters")
    kept = {name: each for name, each in inputs(meta).items() if each}
    found = Found(pickle.dumps(config), kept, size)
    torch.manual_seed(1)
    loss = make(architecture, found).loss(next(batches(found)))
    if not math.isfinite(loss) or not loss.requires_grad:
        raise NotBuilt(f"its loss is {loss}")
    return found


def _inputs(family: str, model: Any) -> dict[str, Input]:
    config, text = model.config, Input((LENGTH,), VOCABULARY - 4)
    if family == "vision":
        side = getattr(config, "image_size", None) or 32
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": Input((channels, height, width)), "labels": Input((1,), CLASSES)}
    if family in ("speech", "audio", "speech to text"):
        name = model.main_input_name
        bins = getattr(config, "num_mel_bins", getattr(config, "input_feat_per_channel", 16))
        if name == "input_values" and "AudioSpectrogram" not in type(model).__name__:
            shape: tuple[int, ...] = (1600,)
        elif "Whisper" in type(model).__name__:
            shape = (bins, 2 * config.max_source_positions)
        else:
            shape = (32, bins)
        labels = Input((1,), CLASSES) if family == "audio" else Input((4,), VOCABULARY - 4)
        return {name: Input(shape), "labels": labels}
    return {"input_ids": text, "labels": text}


def class_of(architecture: str) -> Any:
    import transformers

    return getattr(transformers, architecture)


def _config_class(model_type: str) -> Any:
    import transformers

    return type(transformers.AutoConfig.for_model(model_type))


def _small(kind: Any, sizes: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """A configuration with these sizes where it has such a setting, parts of composed ones included; no dropout.

    ``own`` are settings of this architecture, which come before the sizes.
    """
    base = _default(kind, own)
    renamed = getattr(kind, "attribute_map", {})
    settings: dict[str, Any] = {}
    for name, value in sizes.items():
        if value is None or name in renamed or name in own or not hasattr(base, name):
            continue
        now = getattr(base, name)
        if now is None or isinstance(now, (list, tuple)) == isinstance(value, (list, tuple)):
            settings[name] = value[: len(now)] if isinstance(now, (list, tuple)) else value
    for name, value in base.to_dict().items():
        if ("drop" in name or name == "mask_time_prob") and isinstance(value, float):
            settings[name] = 0.0
    parts = getattr(kind, "sub_configs", {})
    for name in parts:
        part = getattr(base, name, None)
        if part is not None:
            settings[name] = _small(type(part), sizes, own.get(name, {}))
    if getattr(base, "is_encoder_decoder", False):
        settings["decoder_start_token_id"] = sizes.get("decoder_start_token_id")  # a T5 has none by default
    settings |= {name: value for name, value in own.items() if name not in parts}
    return kind(**{name: value for name, value in settings.items() if value is not None})


def _default(kind: Any, own: Mapping[str, Any]) -> Any:
    try:
        return kind()
    except Exception:  # its defaults don't fit each other
        return kind(**own)
