"""Sizes that make architectures small, by the names that configurations have for them."""

from __future__ import annotations

from typing import Any

VOCABULARY = 64
CLASSES = 5
IMAGE = 61
"""The token that stands for a part of an image; random text has none so large."""

SIZES: dict[str, Any] = {
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
MORE_SIZES: dict[str, Any] = {
    **dict.fromkeys(("emb_dim", "out_hidden_size", "text_hidden_size", "output_hidden_size"), 32),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "cross_hidden_size", "hidden_size_global"), 32),
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_dim", "projection_dim", "classifier_proj_size"), 32),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim", "moe_hidden_size"), 32),
    **dict.fromkeys(("image_text_hidden_size", "image_token_embed_dim", "vision_hidden_size", "output_dim"), 32),
    **dict.fromkeys(("output_channels", "base_channels", "latent_channels", "ext_pw_out_channel"), 32),
    **dict.fromkeys(("depthwise_separable_out_channel", "nemo_conv_channels", "post_conv_in_channels"), 32),
    **dict.fromkeys(("post_conv_mid_channels", "post_conv_out_channels", "d_latents"), 32),
    **dict.fromkeys(("mlp_dim", "d_inner", "feed_forward_size", "projection_intermediate_size"), 64),
    **dict.fromkeys(
        ("stem_out_channels", "subsampling_conv_channels", "downsample_hidden_size", "router_hidden_size"), 16
    ),
    **dict.fromkeys(("num_position_embeddings", "feature_projection_input_dim", "laurel_rank"), 16),
    **dict.fromkeys(("linear_head_dim", "index_head_dim", "indexer_head_dim", "cross_head_dim", "groups_width"), 8),
    **dict.fromkeys(("codebook_dim", "codebook_size", "vector_quantization_hidden_dimension", "num_latents"), 8),
    **dict.fromkeys(("linear_num_heads", "cross_num_attention_heads", "cross_num_key_value_heads", "num_groups"), 4),
    **dict.fromkeys(("speech_encoder_layers", "speech_encoder_attention_heads", "num_self_attends_per_block"), 4),
    **dict.fromkeys(("index_topk", "indexer_budget", "num_query_tokens", "mm_tokens_per_image", "num_filters"), 4),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads", "indexer_compress_ratio", "index_kpool", "window_size"), 2),
    **dict.fromkeys(("conv_kernel_size", "conv_depthwise_kernel_size"), 3),
    "indexer_kv_heads": 1,
    **dict.fromkeys(("image_token_id", "image_token_index", "video_token_index"), IMAGE),
    **dict.fromkeys(("global_attn_indexes", "fullatt_block_indexes"), (1, 3)),
    "deepstack_visual_indexes": [1],
    "downsample_channels": (32, 32),
    "speech_encoder_intermediate_size": 64,
    "initializer_range": 0.02,
    "layer_scale_init_value": 0.1,
}
"""Used besides where those don't do, and for architectures that have settings of their own."""

AT_MOST: dict[str, int] = {
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"), 4),
    **dict.fromkeys(("local_attention", "mamba_chunk_size"), 4),
    **dict.fromkeys(("n_group", "encoder_sparse_step", "decoder_sparse_step", "n_layers_per_attn_res_block"), 2),
}
"""In place of larger ones: windows and chunks are shorter than a text, and experts are in groups if they are."""

STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("hidden_sizes", "embed_dims"), (16, 32, 48, 64, 64)),
    "depths": (1, 2, 2, 1),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (2, 4, 4, 8)),
}
"""Of networks in stages: lists, of which the first entries are taken, as many as there are stages."""
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": None},
    {"head_dim": None},
    {"num_key_value_heads": None, "head_dim": None},
    {"head_dim": 16},
    {"patch_size": None, "image_size": None},
    {"intermediate_size": None, "head_dim": None, "num_key_value_heads": None},
    dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "head_dim")),
    dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "num_hidden_layers", "head_dim")),
)
"""What else is tried, in this order: some architectures need sizes that fit each other. ``None`` is the default."""
