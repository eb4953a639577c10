"""What single architectures need besides the sizes that all get: settings that fit each other, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.training.models.sizes import IMAGE, VOCABULARY

Settings = Mapping[str, Any]


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
    """Whether the model takes the rows of all samples in one dimension: the step joins them."""


@dataclass(frozen=True)
class Override:
    config: Settings = field(default_factory=dict)
    """Settings; those of a part of a composed configuration are a dict, and ``None`` is the default."""
    inputs: Mapping[str, Input | None] = field(default_factory=dict)
    """Added to the inputs of the family, or instead of them; ``None`` removes one."""


def override(architecture: str, model_type: str) -> Override | None:
    """The row of a class, or else that of its model type."""
    return _OVERRIDES.get(architecture) or _OVERRIDES.get(model_type)


LENGTH = 12
TEXT = Input((LENGTH,), VOCABULARY - 4)
_IMAGE, _LARGE_IMAGE = Input((3, 32, 32)), Input((3, 64, 64))
_ONLY_TEXT = {"input_features": None, "input_values": None, "input_ids": TEXT, "labels": TEXT}
_OF_IMAGE = {"input_ids": None, "pixel_values": _IMAGE}
_LARGE = {"pixel_values": _LARGE_IMAGE}
_LONGER = {"input_ids": Input((16,), VOCABULARY - 4), "labels": Input((16,), VOCABULARY - 4)}
_CODEBOOKS = {"input_ids": Input((4, LENGTH), VOCABULARY - 4), "labels": Input((LENGTH, 4), VOCABULARY - 4)}
_ALL_FRAMES = {"attention_mask": Input((32,), same=[1] * 32)}


def _with_image(tokens: int, **inputs: Input | None) -> dict[str, Input | None]:
    """Text that begins with tokens of an image."""
    text = Input((LENGTH,), VOCABULARY - 4, first=(IMAGE,) * tokens)
    return {"pixel_values": _IMAGE, "input_ids": text, **inputs}


def _with_patches(values: int = 2 * 3 * 4 * 4) -> dict[str, Input | None]:
    """Text with an image of 4 × 4 patches of so many values, of which 2 × 2 make a token."""
    return _with_image(
        4,
        pixel_values=Input((16, values), joined=True),
        image_grid_thw=Input((3,), same=[1, 4, 4]),
        mm_token_type_ids=Input((LENGTH,), same=[1] * 4 + [0] * (LENGTH - 4)),
    )


_ALTERNATING: Settings = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4}
_CONVOLUTIONS: Settings = {"layer_types": ["conv", "full_attention"] * 2}
_BLOCK_TYPES: Settings = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2}
_GEMMA4_EXPERTS: Settings = {
    **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    **{"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    **{"hidden_size_per_layer_input": 0},
}
"""As in gemma-4-26B-A4B."""
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_GLM4V: Settings = {
    "image_start_token_id": 60,
    "image_end_token_id": 62,
    "text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "vision_config": {"patch_size": 4},
}
_COHERE_TEXT: Settings = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
}
_LATENT_SIZES = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "head_dim"), 16),
}
_DOTS3_TEXT: Settings = _LATENT_SIZES | {f"swa_{name}": size for name, size in _LATENT_SIZES.items()}
_DOTS3_EXPERTS = {"num_local_experts": 4, "mlp_layer_types": ["dense", "sparse"] * 2}
_LOCAL_ATTENTION: Settings = {
    "attn_layers": ["local"] * 4,
    "axial_pos_embds_dim": (16, 16),
    "axial_pos_shape": (4, 4),
    "local_attn_chunk_length": 4,
}
_TOKENIZER: Settings = {"downsampling_ratios": (2, 2), "depths": (1, 1, 1)}
_DECODER: Settings = {"pad_token_id": 0, "decoder": {"is_decoder": True, "add_cross_attention": True}}
_EMU3_TOKENS = {"<image>": IMAGE, "<|extra_200|>": 60, "<|visual token 000000|>": 62, "<|visual token 000001|>": 63}
_PATCHES = [[1 + i // 4, 1 + i % 4, *(0.1 * ((i * 48 + j) % 7 - 3) for j in range(48))] for i in range(16)]
"""Pix2Struct's: row, column and values of each."""

_OVERRIDES: dict[str, Override] = {
    # Text
    "bailing_hybrid": Override(
        {"layer_group_size": 2, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "blt": Override(
        {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "patch_in_forward": False}
        | {"num_hidden_layers": 4}
    ),
    "cohere_compass_text": Override(_COHERE_TEXT),
    "dbrx": Override({"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}),
    "deepseek_v2": Override({"first_k_dense_replace": 1}),
    "dots1": Override(
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "first_k_dense_replace": 1}
    ),
    "Dots3NoteForCausalLM": Override(_DOTS3_TEXT),
    "falcon_h1": Override({"mamba_d_ssm": 64}),
    "gemma3n_text": Override({"intermediate_size": 64}),
    "gemma4_text": Override(  # as in gemma-4-E2B
        {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 3}
        | {"num_hidden_layers": 6, "use_double_wide_mlp": True, "head_dim": 8, "global_head_dim": 16}
    ),
    "GitForCausalLM": Override({}, {"pixel_values": _IMAGE}),
    "gpt_neo": Override({"attention_types": [[["global", "local"], 2]], "window_size": 4}),
    "granitemoehybrid": Override({"layer_types": ["mamba", "attention"] * 2}),
    "jamba": Override({"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2}),
    "kimi_linear": Override(
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "laguna": Override(_ALTERNATING),
    "lfm2": Override(_CONVOLUTIONS),
    "lfm2_moe": Override({**_CONVOLUTIONS, "num_dense_layers": 1}),
    "Llama4ForCausalLM": Override({"interleave_moe_layer_step": 2}),
    "luke": Override({"entity_vocab_size": 16, "entity_emb_size": 16}),
    "mellum": Override(_ALTERNATING),
    "musicgen": Override({}, _CODEBOOKS),
    "musicgen_melody": Override({}, _CODEBOOKS),
    "nemotron_h": Override(_BLOCK_TYPES),
    "PerceiverForMaskedLM": Override(
        {}, {"input_ids": Input((VOCABULARY,), VOCABULARY - 4), "labels": Input((VOCABULARY,), VOCABULARY - 4)}
    ),
    "reformer": Override(_LOCAL_ATTENTION, _LONGER),
    "ReformerModelWithLMHead": Override({**_LOCAL_ATTENTION, "is_decoder": True}, _LONGER),
    "roc_bert": Override(
        {"pronunciation_embed_dim": 16, "pronunciation_vocab_size": 64, "shape_embed_dim": 16, "shape_vocab_size": 64}
    ),
    "xlnet": Override({"max_position_embeddings": None}),
    "xlstm": Override(
        {"v_head_dim": None, "mode": "train", "ffn_round_up_to_multiple_of": 8, "autocast_kernel_dtype": "float32"}
        | {"chunk_size": 4, "hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0}
    ),
    "xmod": Override({"default_language": "en_XX"}),
    "zaya": Override({"num_experts_per_tok": 1}),
    # Images
    "bit": Override({}, _LARGE),
    "convnext": Override({"patch_size": 4}),
    "convnextv2": Override({"patch_size": 4}),
    "cvt": Override(
        {"embed_dim": (16, 32, 48), "num_heads": (1, 2, 2), "depth": (1, 2, 3), "drop_path_rate": (0.0,) * 3}
    ),
    "donut-swin": Override({"patch_size": 2, "embed_dim": 16}),
    "efficientnet": Override(
        {"width_coefficient": 0.25, "depth_coefficient": 1.0, "num_block_repeats": (1,) * 7, "hidden_dim": 320}, _LARGE
    ),
    "hgnet_v2": Override(
        {"stem_channels": (3, 8, 8), "stage_in_channels": (8, 16, 32, 48), "stage_mid_channels": (8, 8, 16, 16)}
        | {"stage_out_channels": (16, 32, 48, 64), "stage_num_blocks": (1, 1, 2, 1), "stage_numb_of_layers": (2,) * 4},
        _LARGE,
    ),
    "imagegpt": Override({}, {"pixel_values": None, "input_ids": Input((16,), VOCABULARY)}),
    "levit": Override({"image_size": 64, "num_attention_heads": (2, 4, 6), "key_dim": (8, 8, 8)}),
    "perceiver": Override({"num_self_attention_heads": 1, "num_cross_attention_heads": 1}),
    "pvt": Override({"image_size": 64}),
    "regnet": Override({}, _LARGE),
    "resnet": Override({}, _LARGE),
    "shieldgemma2": Override(
        {"yes_token_index": 10, "no_token_index": 11, "num_labels": 2},
        _with_image(4, labels=None, target=Input((), same=1)),
    ),
    "siglip2": Override(
        {},
        {"pixel_values": Input((16, 3 * 8 * 8)), "spatial_shapes": Input((2,), same=[4, 4])}
        | {"pixel_attention_mask": Input((16,), same=[1] * 16)},
    ),
    "swin": Override({"patch_size": 2, "embed_dim": 16}),
    "swinv2": Override({"patch_size": 2, "embed_dim": 16}),
    "textnet": Override({"image_size": 64}),
    # Images and text
    "blip": Override({"text_config": {"bos_token_id": 1}}, {"pixel_values": _IMAGE}),
    "blip-2": Override({}, _with_image(4)),
    "chameleon": Override(
        {"vocabulary_map": {"<image>": IMAGE, "IMGIMGBSA": 62, "IMGIMGAZA": 63}}
        | {"vq_config": {"num_embeddings": 8, "resolution": 32}}
    ),
    "cohere_compass": Override({"text_config": _COHERE_TEXT, "vision_config": {"patch_size": 4}}, _with_patches()),
    "deepseek_ocr2": Override(
        {"text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"] * 2, "n_group": 1}}
        | {"vision_config": {"sam_config": {"downsample_channels": [32, 32]}}}
    ),
    "diffusion_gemma": Override(
        {"canvas_length": LENGTH, "text_config": {"head_dim": 8, "global_head_dim": 16, "top_k_experts": 2}}
    ),
    "Dots3NoteForConditionalGeneration": Override(
        {"text_config": _DOTS3_TEXT, "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32} | _DOTS3_EXPERTS}
        | {"audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32}}
    ),
    "emu3": Override(
        {"vocabulary_map": _EMU3_TOKENS, "vq_config": {"codebook_size": 2}},
    ),
    "ernie4_5_vl_moe": Override(
        {"image_start_token_id": 60, "image_end_token_id": 62, "vision_config": {"patch_size": 4}}
        | {
            "text_config": {
                "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2]},
                "moe_intermediate_size": [32, 16],
            }
        },
        _with_patches(3 * 4 * 4),
    ),
    "florence2": Override(
        {"vision_config": {"embed_dim": (16, 32, 32, 32), "num_heads": (2,) * 4, "num_groups": (2,) * 4}},
        _with_image(2),
    ),
    "gemma4": Override({"text_config": _GEMMA4_EXPERTS}),
    "glm4v": Override(_GLM4V, _with_patches()),
    "glm46v": Override(_GLM4V, _with_patches()),
    "glm4v_moe": Override(_GLM4V, _with_patches()),
    "glm5_next": Override(
        {"text_config": {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0}}
        | {"vision_config": {"patch_size": 4}},
        _with_patches(),
    ),
    "glm_ocr": Override(_GLM4V, _with_patches()),
    "granite4_vision": Override(
        {"deepstack_layer_map": [[1, 0], [2, 1]], "downsample_rate": "1/2", "text_config": {"hidden_size": 64}}
        | {"vision_config": {"hidden_size": 64}, "qformer_config": {"encoder_hidden_size": 64, "hidden_size": 64}}
    ),
    "hunyuan_vl": Override({"text_config": {"rope_parameters": {**_MROPE, "mrope_section": [1] * 4}}}),
    "idefics": Override(
        {"vision_config": {"image_size": 32, "patch_size": 8, "embed_dim": 32}, "use_resampler": False},
        {"pixel_values": Input((1, 3, 32, 32)), "image_attention_mask": Input((LENGTH, 1), same=[[1]] * LENGTH)},
    ),
    "instructblip": Override({}, _with_image(4, qformer_input_ids=TEXT)),
    "instructblipvideo": Override(
        {"num_query_tokens": 2}, _with_image(4, pixel_values=Input((2, 3, 32, 32)), qformer_input_ids=TEXT)
    ),
    "janus": Override(
        {"vision_config": {"num_image_tokens": 4, "image_size": 16}, "vq_config": {"num_embeddings": 16}},
        _with_image(4, pixel_values=Input((3, 16, 16))),
    ),
    "kosmos-2": Override(
        {"latent_query_num": 4, "text_config": {"layers": 4, "attention_heads": 4}},
        _with_image(4, image_embeds_position_mask=Input((LENGTH,), same=[1] * 4 + [0] * (LENGTH - 4))),
    ),
    "lfm2_vl": Override({"text_config": _CONVOLUTIONS}),
    "llama4": Override({"vision_config": {"intermediate_size": 128}}, _with_image(4)),
    "molmo2": Override(
        {"adapter_config": {"vision_feature_layer": [3, 1]}, "text_config": {"additional_vocab_size": 8}},
        {"mm_token_type_ids": Input((LENGTH,), same=[0] * LENGTH)},
    ),
    "muse_spark": Override({"audio_config": {"hidden_sizes": (8, 16, 16, 32), "depths": (1,) * 4}}),
    "nemotron_h_omni": Override({"vision_config": {"video_temporal_patch_size": 2}, "text_config": _BLOCK_TYPES}),
    "pi0": Override(
        {"chunk_size": 4, "max_state_dim": 8, "max_action_dim": 8, "vlm_config": {"hidden_size": 32}},
        {"input_ids": Input((20,), VOCABULARY - 4, first=(IMAGE,) * 16), "pixel_values": Input((1, 3, 32, 32))}
        | {"pixel_attention_mask": Input((1,), same=[True]), "state": Input((8,)), "actions": Input((4, 8))}
        | {"labels": None, "noise": Input((4, 8)), "timestep": Input((), same=0.5)},
    ),
    "pix2struct": Override(
        {"vision_config": {"patch_embed_hidden_size": 48, "seq_len": 16}, "text_config": {"hidden_size": 32}},
        {"input_ids": None, "flattened_patches": Input((16, 50), same=_PATCHES)},
    ),
    "pp_formulanet": Override({}, {**_OF_IMAGE, "decoder_input_ids": TEXT}),
    "qwen2_vl": Override(
        {"text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4}}, _with_patches()
    ),
    "qwen2_5_omni_thinker": Override({"text_config": {"rope_parameters": _MROPE}}),
    "qwen2_5_vl": Override(
        {"text_config": {"rope_parameters": _MROPE}, "vision_config": {"patch_size": 4, "window_size": 16}},
        _with_patches(),
    ),
    "qwen3_omni_moe_thinker": Override({"text_config": {"rope_parameters": _MROPE}}),
    "step3p7": Override({"text_config": _ALTERNATING}),
    "udop": Override(
        {"max_2d_position_embeddings": 32}, {"bbox": Input((LENGTH, 4), same=[[0.1, 0.1, 0.5, 0.5]] * LENGTH)}
    ),
    "vision-encoder-decoder": Override(_DECODER, _OF_IMAGE),
    # Speech
    "audio-spectrogram-transformer": Override(
        {"frequency_stride": 4, "time_stride": 4}, {"input_values": Input((32, 16))}
    ),
    "dia": Override(
        {"delay_pattern": [0, 1], "decoder_config": {"num_channels": 2}, "encoder_config": {"num_key_value_heads": 4}},
        {**_ONLY_TEXT, "decoder_input_ids": Input((LENGTH, 2), 60), "labels": Input((2 * LENGTH,), 60)},
    ),
    "fun_asr_nano": Override(
        {"adaptor_config": {"intermediate_size": 8}, "audio_config": {"num_timestamp_prediction_layers": 1}}, _ONLY_TEXT
    ),
    "granite_speech5_ctc": Override(
        {"encoder_config": {"context_size": 8, "num_key_value_heads": 4}},
        {"input_features": Input((32, 64)), **_ALL_FRAMES},
    ),
    "kyutai_speech_to_text": Override(
        {"audio_pad_token_id": 60, "codebook_vocab_size": 30, "audio_bos_token_id": 29, "num_codebooks": 2}
        | {"codec_config": {"upsample_groups": 32, "num_quantizers": 2}},
        {**_ONLY_TEXT, "input_ids": Input((LENGTH, 3), 20)},
    ),
    "lasr_ctc": Override({}, _ALL_FRAMES),
    "moonshine_streaming": Override(
        {"num_key_value_heads": 4, "encoder_config": {"num_key_value_heads": 4, "sliding_windows": [[16, 4]] * 4}}
    ),
    "parakeet_ctc": Override({}, _ALL_FRAMES),
    "pop2piano": Override({}, {"input_ids": None, "input_features": Input((LENGTH, 32))}),
    "seamless_m4t": Override({"adaptor_kernel_size": 4, "adaptor_stride": 4}),
    "seamless_m4t_v2": Override({"adaptor_kernel_size": 4, "adaptor_stride": 4}),
    "speech-encoder-decoder": Override(
        _DECODER, {"input_features": None, "inputs": None, "input_values": Input((1600,))}
    ),
    "vibevoice": Override(
        {"audio_config": _TOKENIZER, "semantic_model_config": _TOKENIZER, "diffusion_head_config": {"latent_size": 32}},
        _ONLY_TEXT,
    ),
    "vibevoice_asr": Override(
        {"acoustic_tokenizer_encoder_config": _TOKENIZER, "semantic_tokenizer_encoder_config": _TOKENIZER}
    ),
    "voxtral_realtime": Override({"audio_config": {"sliding_window": 8}}, {"input_features": Input((16, 96))}),
}
NAMES = _OVERRIDES.keys()
