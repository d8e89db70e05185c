"""Numbers that cannot be found by their names: what some types of models need besides the rules of `shrinking.py`."""

from typing import Any


def _rope(*section: int, **more: Any) -> dict[str, Any]:
    """Frames, rows and columns share the rotary half of a head of 16."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section), **more}}


_EQUAL_HEADS = {"num_key_value_heads": 4}
_HEAD = {"head_dim": 16}
_FOUR_STAGES = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
_NECK = {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16, "reassemble_hidden_size": 64}
_DEPTH = {"backbone_config": {"model_type": "dinov2", "hidden_size": 64, "num_attention_heads": 4, "image_size": 32,
                              "patch_size": 8, **_FOUR_STAGES}, **_NECK}  # fmt: skip
_RESNET = {
    "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"], "depths": [1, 1, 1, 1]},
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
}  # fmt: skip
_TILES = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
_TEXT_OF_THREE_AXES = {"text_config": _rope(2, 3, 3)}
_THINKER = {
    **_TEXT_OF_THREE_AXES,
    "vision_start_token_id": 410,
    "vision_end_token_id": 411,
    "audio_start_token_id": 412,
}

SPECIAL: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 640},
    "bailing_hybrid": {"num_group": 1, "topk_group": 1, "n_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 400}},
    "conditional_detr": _RESNET,
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deformable_detr": _RESNET,
    "depth_anything": _DEPTH,
    "detr": _RESNET,
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16},
    "efficientnet": {"hidden_dim": 2560},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 420, "<image>": 400}},
    "esm": {"vocab_size": 512, "mask_token_id": 4},
    "esmc": _EQUAL_HEADS,
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "fsmt": {"src_vocab_size": 512, "tgt_vocab_size": 512, "langs": ["en", "de"]},
    "gemma3": {"mm_tokens_per_image": 4},
    "glm46v": {"text_config": _rope(2, 3, 3)},
    "glm4v": {"text_config": _rope(2, 3, 3)},
    "glm4v_moe": {"text_config": _rope(1, 1, 2, partial_rotary_factor=0.5)},
    "glm5_next": {"text_config": _EQUAL_HEADS},
    "glm_ocr": {"text_config": _rope(2, 3, 3)},
    "glmga": {"text_config": _rope(2, 3, 3)},
    "glpn": {"decoder_hidden_size": 16, "hidden_sizes": [16, 16, 16, 16], "num_attention_heads": [1, 2, 2, 2]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl": {"text_config": _HEAD},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 2, "n_routed_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lilt": {"hidden_size": 96, "num_attention_heads": 4},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": _HEAD,
    "mobilebert": {"hidden_size": 64, "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32,
                   "intermediate_size": 64},
    "mobilevitv2": {"patch_size": 2, "image_size": 64},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "mpnet": {"relative_attention_num_buckets": 32},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "poolformer": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    "pop2piano": {"d_model": 80},
    "prompt_depth_anything": _DEPTH,
    "pvt": {"patch_sizes": [4, 2, 2, 2], "image_size": 64},
    "qwen2_5_omni_thinker": _THINKER,
    "qwen2_5_vl": _TEXT_OF_THREE_AXES,
    "qwen2_vl": _TEXT_OF_THREE_AXES,
    "qwen3_omni_moe_thinker": _THINKER,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16], "num_attention_heads": 4,
                 "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
                 "num_buckets": 2, "max_position_embeddings": 128, "is_decoder": False},
    "siglip2": {"vision_config": {"num_patches": 16}},
    "step3p7": {"text_config": _HEAD},
    "swin": {"image_size": 56, "patch_size": 4, "window_size": 7},
    "donut-swin": {"image_size": 56, "patch_size": 4, "window_size": 7},
    "swinv2": {"image_size": 64, "patch_size": 4, "window_size": 8},
    "maskformer-swin": {"image_size": 56, "patch_size": 4, "window_size": 7},
    "table-transformer": _RESNET,
    "tipsv2_dpt": {"neck_hidden_sizes": [16, 16, 32, 32]},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "wav2vec2-bert": {"vocab_size": 512},
    "wav2vec2-conformer": {"vocab_size": 512},
    "xlnet": {"d_head": 16},
    "xlstm": {"qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
              "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "zaya": {"num_experts_per_tok": 1},
    "zoedepth": _DEPTH,
}  # fmt: skip
