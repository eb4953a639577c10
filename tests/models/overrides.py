"""What single architectures need besides the sizes that all get: settings that fit each other, and inputs of their own.

A row is found by the name of a class, or else by its model type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLASSES = 5
VOCABULARY = 64
IMAGE = 61
"""The token that stands for a patch of an image, outside of the range of random text."""


@dataclass(frozen=True)
class Input:
    """One tensor of a batch."""

    shape: tuple[int, ...]
    """Of a sample."""
    end: int = 0
    """Of the range of random whole numbers, which starts at 3; 0 for random floats."""
    first: tuple[int, ...] = ()
    """Whole numbers that each sample starts with, such as tokens of an image."""
    same: Any = None
    """The value of each sample, where it isn't random."""
    joined: bool = False
    """Whether the model takes the samples' rows in one dimension: the step joins them."""


@dataclass(frozen=True)
class Override:
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings; those of a part of a composed configuration are a dict."""
    inputs: Mapping[str, Input | None] = field(default_factory=dict)
    """Added to the inputs of the family, or instead of them; ``None`` removes one."""


def override(architecture: str, model_type: str) -> Override:
    return _OVERRIDES.get(architecture) or _OVERRIDES.get(model_type) or Override()


_IMAGE = Input((3, 32, 32))

_OVERRIDES: dict[str, Override] = {
    # Text
    "gpt_neo": Override({"attention_types": [[["global", "local"], 2]], "window_size": 4}),
    "xlm": Override({"emb_dim": 32}),
    "flaubert": Override({"emb_dim": 32}),
    "luke": Override({"entity_vocab_size": 16, "entity_emb_size": 16}),
    "roc_bert": Override(
        {
            "pronunciation_embed_dim": 16,
            "pronunciation_vocab_size": 64,
            "shape_embed_dim": 16,
            "shape_vocab_size": 64,
        },
    ),
    "xlnet": Override({"d_inner": 64, "max_position_embeddings": None, "n_ctx": None}),
    "xmod": Override({"default_language": "en_XX"}),
    "zaya": Override({"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "dots1": Override({"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "falcon_h1": Override({"mamba_d_ssm": 64}),
    "granitemoehybrid": Override({"layer_types": ["mamba", "attention"] * 2}),
    "lfm2_moe": Override({"layer_types": ["conv", "full_attention"] * 2}),
    "qwen4_exp": Override(
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        }
    ),
    "GitForCausalLM": Override({}, {"pixel_values": _IMAGE}),
    "musicgen": Override({}, {"input_ids": Input((4, 12), 60), "labels": Input((12, 4), 60)}),
    # Images
    "resnet": Override({"image_size": 64}, {"pixel_values": Input((3, 64, 64))}),
    "regnet": Override({"groups_width": 8}, {"pixel_values": Input((3, 64, 64))}),
    "bit": Override({"num_groups": 4}, {"pixel_values": Input((3, 64, 64))}),
    "convnext": Override({"patch_size": 4, "layer_scale_init_value": 0.1}),
    "convnextv2": Override({"patch_size": 4}),
    "hgnet_v2": Override(
        {
            "stem_channels": (3, 8, 8),
            "stage_in_channels": (8, 16, 32, 48),
            "stage_mid_channels": (8, 8, 16, 16),
            "stage_out_channels": (16, 32, 48, 64),
            "stage_num_blocks": (1, 1, 2, 1),
            "stage_numb_of_layers": (2,) * 4,
        },
        {"pixel_values": Input((3, 64, 64))},
    ),
    "levit": Override({"image_size": 64, "hidden_sizes": (16, 32, 48), "num_attention_heads": (2, 4, 6), "key_dim": (8, 8, 8)}, {"pixel_values": Input((3, 64, 64))}),
    "poolformer": Override({"layer_scale_init_value": 0.1}),
    "pvt": Override({"image_size": 64}),
    "imagegpt": Override({}, {"pixel_values": None, "input_ids": Input((16,), VOCABULARY)}),
    "siglip2": Override({}, {
        "pixel_values": Input((16, 192)),
        "pixel_attention_mask": Input((16,), same=[1] * 16),
        "spatial_shapes": Input((2,), same=[4, 4]),
    }),
    "dbrx": Override({"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": 32}}),
    "kimi_linear": Override({"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4}),
    "bailing_hybrid": Override({"layer_group_size": 2, "num_key_value_heads": 4}),
    "cvt": Override({"embed_dim": (16, 32, 48), "num_heads": (1, 2, 2), "depth": (1, 2, 3), "drop_path_rate": (0.0,) * 3}),
    "swin": Override({"patch_size": 2, "window_size": 2, "embed_dim": 16, "num_heads": (2, 4, 4, 8)}),
    "swinv2": Override({"patch_size": 2, "window_size": 2, "embed_dim": 16, "num_heads": (2, 4, 4, 8)}),
    "donut-swin": Override({"patch_size": 2, "window_size": 2, "embed_dim": 16, "num_heads": (2, 4, 4, 8)}),
    "efficientnet": Override({"width_coefficient": 0.25, "depth_coefficient": 1.0, "num_block_repeats": (1,) * 7, "image_size": 64, "hidden_dim": 320}),
    "gemma3n_text": Override({"num_kv_shared_layers": 0, "laurel_rank": 8, "intermediate_size": 64}),
    "musicgen_melody": Override({}, {"input_ids": Input((4, 12), 60), "labels": Input((12, 4), 60)}),
    "perceiver": Override({"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 4, "num_self_attention_heads": 1, "num_cross_attention_heads": 1}),
    "PerceiverForMaskedLM": Override({"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 4}, {"input_ids": Input((64,), 60), "labels": Input((64,), 60)}),
    "reformer": Override({"attn_layers": ["local"] * 4, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "local_attn_chunk_length": 4, "feed_forward_size": 64}, {"input_ids": Input((16,), 60), "labels": Input((16,), 60)}),
    "ReformerModelWithLMHead": Override({"is_decoder": True, "attn_layers": ["local"] * 4, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 4), "local_attn_chunk_length": 4, "feed_forward_size": 64}, {"input_ids": Input((16,), 60), "labels": Input((16,), 60)}),
    "textnet": Override({"image_size": 64, "stem_out_channels": 16}),
    "xlstm": Override({"v_head_dim": None, "mode": "train", "ffn_round_up_to_multiple_of": 8, "autocast_kernel_dtype": "float32", "chunk_size": 4, "qk_dim_factor": 1.0}),
    "cohere_compass_text": Override({"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}),
    "blt": Override({"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "patch_in_forward": False}),
    "phi4_multimodal": Override({"audio_config": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32, "input_size": 16, "num_blocks": 2}}),
    "gemma4_assistant": Override({"backbone_hidden_size": 32, "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "head_dim": 8, "num_kv_shared_layers": 4, "num_hidden_layers": 4}}),
}
