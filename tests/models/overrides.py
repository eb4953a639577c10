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


_LENGTH = 12
_TEXT = Input((_LENGTH,), VOCABULARY - 4)
_IMAGE = Input((3, 32, 32))
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def _with_image(tokens: int, **inputs: Input | None) -> dict[str, Input | None]:
    """Text that begins with tokens of an image."""
    return {"pixel_values": _IMAGE, "input_ids": Input((_LENGTH,), VOCABULARY - 4, first=(IMAGE,) * tokens), **inputs}


def _with_patches(side: int, channels: int = 3 * 2) -> dict[str, Input | None]:
    """Text with an image of 4 × 4 patches, of which 2 × 2 make a token."""
    return _with_image(
        4,
        pixel_values=Input((16, channels * side * side), joined=True),
        image_grid_thw=Input((3,), same=[1, 4, 4]),
        mm_token_type_ids=Input((_LENGTH,), same=[1] * 4 + [0] * (_LENGTH - 4)),
    )


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
    "cohere_compass_text": Override({"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}, "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}),
    "blt": Override({"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "patch_in_forward": False}),
    "phi4_multimodal": Override({"audio_config": {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32, "input_size": 16, "num_blocks": 2}}),
    "gemma4_assistant": Override({"backbone_hidden_size": 32, "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "head_dim": 8, "num_kv_shared_layers": 4, "num_hidden_layers": 4}}),
    "kimi_linear": Override({"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "blip-2": Override({"image_token_index": IMAGE, "num_query_tokens": 4, "qformer_config": {"encoder_hidden_size": 32}, "vision_config": {"initializer_range": 0.02}}, _with_image(4)),
    "blip": Override({"image_text_hidden_size": 32, "projection_dim": 32, "text_config": {"encoder_hidden_size": 32, "bos_token_id": 1}, "vision_config": {"initializer_range": 0.02}}, {"pixel_values": _IMAGE}),
    "instructblip": Override({"image_token_index": IMAGE, "num_query_tokens": 4, "qformer_config": {"encoder_hidden_size": 32}, "vision_config": {"initializer_range": 0.02}}, _with_image(4, qformer_input_ids=_TEXT)),
    "chameleon": Override({"vocabulary_map": {"<image>": IMAGE, "IMGIMGBSA": 62, "IMGIMGAZA": 63}, "vq_config": {"base_channels": 32, "num_embeddings": 8, "resolution": 32, "latent_channels": 32}}),
    "emu3": Override({"vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": 60, "<|visual token 000000|>": 62, "<|visual token 000001|>": 63}, "vq_config": {"base_channels": 32, "codebook_size": 2, "hidden_size": 32}}),
    "qwen2_vl": Override({"image_token_id": IMAGE, "text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4}}, _with_patches(4)),
    "qwen2_5_vl": Override({"image_token_id": IMAGE, "text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1, 3]}}, _with_patches(4)),
    "glm4v": Override({"image_token_id": IMAGE, "image_start_token_id": 60, "image_end_token_id": 62, "text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "intermediate_size": 64}}, _with_patches(4)),
    "glm46v": Override({"image_token_id": IMAGE, "image_start_token_id": 60, "image_end_token_id": 62, "text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "intermediate_size": 64}}, _with_patches(4)),
    "ernie4_5_vl_moe": Override({"image_token_id": IMAGE, "image_start_token_id": 60, "image_end_token_id": 62, "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, "moe_intermediate_size": [32, 16]}, "vision_config": {"patch_size": 4}}, _with_patches(4, 3)),
    "florence2": Override({"image_token_id": IMAGE, "vision_config": {"depths": (1, 1, 2, 1), "embed_dim": (16, 32, 32, 32), "num_heads": (2,) * 4, "num_groups": (2,) * 4, "window_size": 2, "projection_dim": 32, "drop_path_rate": 0.0}}, _with_image(2)),
    "idefics": Override({"additional_vocab_size": 0, "vision_config": {"image_size": 32, "patch_size": 8, "embed_dim": 32}, "use_resampler": False}, {"pixel_values": Input((1, 3, 32, 32)), "image_attention_mask": Input((12, 1), same=[[1]] * 12)}),
    "janus": Override({"image_token_id": IMAGE, "vision_config": {"projection_dim": 32, "num_image_tokens": 4, "image_size": 16}, "vq_config": {"base_channels": 32, "num_embeddings": 16, "latent_channels": 32, "projection_dim": 32, "image_token_embed_dim": 32}}, _with_image(4, pixel_values=Input((3, 16, 16)))),
    "kosmos-2": Override({"latent_query_num": 4, "text_config": {"layers": 4, "attention_heads": 4}}, _with_image(4, image_embeds_position_mask=Input((12,), same=[1] * 4 + [0] * 8))),
    "llama4": Override({"image_token_index": IMAGE, "vision_config": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}}),
    "udop": Override({"max_2d_position_embeddings": 32}, {"bbox": Input((12, 4), same=[[0.1, 0.1, 0.5, 0.5]] * 12)}),
    "xlstm": Override({"v_head_dim": None, "mode": "train", "ffn_round_up_to_multiple_of": 8, "autocast_kernel_dtype": "float32", "chunk_size": 4, "hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0}),
    "shieldgemma2": Override(
        {"image_token_id": IMAGE, "image_token_index": IMAGE, "yes_token_index": 10, "no_token_index": 11, "mm_tokens_per_image": 4, "num_labels": 2},
        _with_image(4, labels=None, target=Input((), same=1)),
    ),
    "instructblipvideo": Override({"video_token_index": IMAGE, "num_query_tokens": 2, "qformer_config": {"encoder_hidden_size": 32}, "vision_config": {"initializer_range": 0.02}}, _with_image(4, pixel_values=Input((2, 3, 32, 32)), qformer_input_ids=_TEXT)),
    "glm4v_moe": Override({"image_token_id": IMAGE, "image_start_token_id": 60, "image_end_token_id": 62, "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "intermediate_size": 64}}, _with_patches(4)),
    "glm_ocr": Override({"image_token_id": IMAGE, "image_start_token_id": 60, "image_end_token_id": 62, "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "intermediate_size": 64}}, _with_patches(4)),
    "vision-encoder-decoder": Override({"pad_token_id": 0, "decoder": {"is_decoder": True, "add_cross_attention": True}}, {"input_ids": None, "pixel_values": _IMAGE}),
    "speech-encoder-decoder": Override({"pad_token_id": 0, "decoder": {"is_decoder": True, "add_cross_attention": True}}, {"input_features": None, "inputs": None, "input_values": Input((1600,))}),
    "bailing_hybrid": Override({"layer_group_size": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "pix2struct": Override({"vision_config": {"patch_embed_hidden_size": 48, "seq_len": 16, "initializer_range": 0.02}, "text_config": {"hidden_size": 32, "relative_attention_max_distance": 16}}, {"input_ids": None, "flattened_patches": Input((16, 50)), "labels": _TEXT}),
    "cohere_compass": Override({"image_token_id": IMAGE, "text_config": {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE}}, "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [1], "patch_size": 4, "num_position_embeddings": 16}}, _with_patches(4)),
    "deepseek_ocr2": Override({"text_config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"] * 2, "n_group": 1, "topk_group": 1}}),
    "deepseek_vl_hybrid": Override({"high_res_vision_config": {"mlp_dim": 64, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1, 3]}}),
    "diffusion_gemma": Override({"canvas_length": 12, "text_config": {"head_dim": 8, "global_head_dim": 16}}),
    "glm5_next": Override({"image_token_id": IMAGE, "text_config": {"num_key_value_heads": 4}, "vision_config": {"patch_size": 4, "out_hidden_size": 32, "projection_intermediate_size": 64}}, _with_patches(4)),
    "granite4_vision": Override({"deepstack_layer_map": [[1, 0], [2, 1]], "qformer_config": {"encoder_hidden_size": 32}}),
    "granite_docling": Override({"vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [1]}}),
    "hunyuan_vl": Override({"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}}, "vision_config": {"out_hidden_size": 32, "text_hidden_size": 32}}),
    "inkling2": Override({"vision_config": {"text_hidden_size": 32, "projection_hidden_dim": 32}}),
    "molmo2": Override({"vision_config": {"num_position_embeddings": 16}, "adapter_config": {"vision_feature_layer": [3, 1], "text_hidden_size": 32}, "text_config": {"additional_vocab_size": 8}}),
    "muse_glimmer": Override({"out_hidden_size": 32, "projector_hidden_size": 32}),
    "muse_spark": Override({"out_hidden_size": 32, "projector_hidden_size": 32, "audio_config": {"out_hidden_size": 32, "hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 1, 1)}}),
    "nemotron_h_omni": Override({"vision_hidden_size": 32, "projector_hidden_size": 32, "vision_config": {"video_temporal_patch_size": 2}}),
    "pi0": Override({"chunk_size": 4, "max_state_dim": 8, "max_action_dim": 8}, {"state": Input((8,)), "actions": Input((4, 8)), "noise": Input((4, 8)), "timestep": Input((), same=0.5), "pixel_values": Input((1, 3, 32, 32))}),
    "pp_formulanet": Override({"vision_config": {"mlp_dim": 64, "output_channels": 32, "window_size": 2, "global_attn_indexes": [1, 3], "post_conv_in_channels": 32, "post_conv_mid_channels": 32, "post_conv_out_channels": 32, "decoder_hidden_size": 32}}, {"input_ids": None, "pixel_values": _IMAGE}),
    "qwen2_5_omni_thinker": Override({"text_config": {"rope_parameters": _MROPE}, "audio_config": {"output_dim": 32}, "vision_config": {"out_hidden_size": 32, "fullatt_block_indexes": [1, 3]}}),
    "qwen3_omni_moe_thinker": Override({"text_config": {"rope_parameters": _MROPE}, "audio_config": {"output_dim": 32, "downsample_hidden_size": 16}, "vision_config": {"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [1]}}),
    "Qwen4ExpForConditionalGeneration": Override({"text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        }, "vision_config": {"out_hidden_size": 32, "num_position_embeddings": 16}}),
    "step3p7": Override({"text_config": {"sliding_window": 4}}),
    "unlimited_ocr": Override({"vision_config": {"sam_config": {"mlp_dim": 64, "output_channels": 32, "downsample_channels": (32, 32)}}}),
}
