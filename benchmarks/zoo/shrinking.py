"""Makes a configuration of transformers tiny, by the names of its numbers.

The default configuration says which names there are; each known name gets a small value, nested configurations too.
Nothing is invented: a name the default does not have is not passed, except those of `SPECIAL`.
"""

import re
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, HEADS, HEAD_WIDTH, VOCABULARY = 64, 4, 16, 512
FIRST_SPECIAL_TOKEN = 400
"""Placeholders for images and the like lie above the ids that batches are made of."""

_EXACT: dict[str, Any] = {
    "head_dim": HEAD_WIDTH, "d_kv": HEAD_WIDTH, "kv_channels": HEAD_WIDTH, "global_head_dim": HEAD_WIDTH,
    "attention_head_dim": HEAD_WIDTH, "v_head_dim": HEAD_WIDTH, "qk_nope_head_dim": HEAD_WIDTH,
    "qk_rope_head_dim": 8, "qk_head_dim": 24, "q_lora_rank": 24, "kv_lora_rank": 16, "o_lora_rank": 16,
    "index_head_dim": HEAD_WIDTH, "index_n_heads": 2, "index_topk": 8, "rotary_dim": 8,
    "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "num_nextn_predict_layers": 0,
    "linear_key_head_dim": HEAD_WIDTH, "linear_value_head_dim": HEAD_WIDTH, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": HEAD_WIDTH, "linear_num_heads": 4,
    "mamba_d_head": HEAD_WIDTH, "mamba_head_dim": HEAD_WIDTH, "mamba_n_heads": 8, "mamba_num_heads": 8,
    "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_n_groups": 1, "n_groups": 1,
    "image_size": 32, "patch_size": 8, "max_source_positions": 2000, "num_mel_bins": 16, "num_queries": 8,
    "word_embed_proj_dim": WIDTH, "embedding_size": WIDTH, "projection_dim": WIDTH, "query_pre_attn_scalar": 16,
    "type_vocab_size": 2, "classifier_proj_size": 32, "relative_attention_num_buckets": 16, "lru_width": WIDTH,
    "conv_depthwise_kernel_size": 5, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "vision_feature_layer": -1, "num_query_tokens": 4, "qformer_hidden_size": WIDTH, "encoder_stride": 8,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
    "window_size": 32, "time_step_rank": 4, "spatial_merge_size": 2, "chunk_size": 8,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1],
    "num_frames": 4, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "num_codevectors_per_group": 8,
    "codevector_dim": 32, "proj_codevector_dim": 32, "conv_dim": None, "pretraining_tp": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3,
    "forced_eos_token_id": None, "vocab_size": VOCABULARY, "mamba_chunk_size": 8, "sliding_window": 12,
    "attention_window": 8, "local_attention": 12, "max_window_layers": 1, "num_memory_blocks": 2,
    "use_mamba_kernels": False, "out_hidden_size": WIDTH,
    "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip

_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_PATTERNS: tuple[tuple[str, int], ...] = (
    (r"(num_)?key_value_heads$|num_kv_heads$|n_kv_heads$|attention_groups$|num_query_groups$", 2),
    (r"(^|_)(n_)?heads?$", HEADS),
    (r"(^|_)vocab_size", VOCABULARY),
    (r"shared_experts?$", 1),
    (r"experts?$", 4),
    (r"(^|_)(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|d_inner|n_inner|mlp_dim|dim_ff|feed_forward_size)", 96),
    (r"intermediate_size", 48),
    (r"(hidden_size|hidden_dim|d_model|n_embd|emb_dim|width|embed_dim|embedding_dim|output_dim|text_dim)$", WIDTH),
    (r"^(dim|dim_model|embed_dim)$", WIDTH),
    (r"(layers?|depth|blocks|resblocks)$", 2),
    (r"(position_embeddings|positions|n_positions|max_seq_len|max_length)$", 512),
)
_NEVER = re.compile(
    r"hash_layers|adapter|feat_extract|upsample|conv_layers|max_2d|relative|_pos_embeddings|residual|tdnn|"
    r"merge|subsampling|downsampl|out_|return_|kv_shared|codebook|quantiz|classes|num_labels"
)
_LISTS_OF_ONES = ("depths", "layers", "num_block_repeats", "num_conv_bottleneck", "stage_num_blocks")
_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "attention_layers")


def tiny_config(model_type: str, special: dict[str, Any]) -> PretrainedConfig:
    """The configuration of this type of model, tiny."""
    config_class = CONFIG_MAPPING[model_type]
    default = _default(config_class, special)
    values = {**_TOKENS, **small_values(default)}
    if getattr(default, "is_encoder_decoder", False):
        values["decoder_start_token_id"] = 1
    config = config_class(**_merged(values, special))
    _without_layer_drop(config)
    return config


def _without_layer_drop(config: PretrainedConfig) -> None:
    """A layer that a coin leaves out makes every step cost something else; the zoo is about architectures."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _without_layer_drop(value)
        elif re.search(r"layer_?drop", name) and isinstance(value, float):
            setattr(config, name, 0.0)


def _default(config_class: Any, special: dict[str, Any]) -> PretrainedConfig:
    try:
        return config_class()
    except Exception:  # some have no valid default
        return config_class(**special)


def small_values(config: PretrainedConfig) -> dict[str, Any]:
    """The arguments with which a configuration of this class becomes tiny."""
    values: dict[str, Any] = {}
    inner = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    nested = {name: part for name, part in inner.items() if isinstance(part, PretrainedConfig)}
    for name, default in config.to_dict().items():
        if name in nested:
            values[name] = {"model_type": nested[name].model_type, **small_values(nested[name])}
            continue
        value = _small(name, default)
        if value is not None:
            values[name] = value
    _keep_what_belongs_together(config, values)
    _one_layer_of_each_kind(config, values)
    _special_tokens(config, values)
    return values


def _small(name: str, default: Any) -> Any:
    if isinstance(default, bool) or not isinstance(default, int | float | list | tuple):
        return None
    if isinstance(default, list | tuple):
        whole = bool(default) and all(isinstance(item, int) for item in default)
        return [1] * len(default) if name in _LISTS_OF_ONES and whole else None
    if name in _EXACT:
        return _EXACT[name] if default or name.endswith("_id") else None
    if not isinstance(default, int) or default <= 0 or _NEVER.search(name):
        return None
    return next((min(default, value) for pattern, value in _PATTERNS if re.search(pattern, name)), None)


def _keep_what_belongs_together(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Names that have another meaning beside certain others."""
    if "qk_rope_head_dim" in values:  # latent attention: head_dim is a name for the rotary part
        values.pop("head_dim", None)
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = HEADS
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:  # frames, rows and columns share the rotary half of a head
        share = float(rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)) or 1.0)
        half = int(HEAD_WIDTH * share) // 2
        values["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    stages = ("num_heads", "hidden_sizes", "num_attention_heads", "embed_dims", "neck_hidden_sizes", "embed_dim")
    if any(isinstance(getattr(config, name, None), list | tuple) for name in stages):
        for name in ("embed_dim", "hidden_size", "hidden_dim", "decoder_hidden_size", "window_size", "patch_size"):
            values.pop(name, None)
    if values.get("num_attention_heads") == 1:
        values.pop("num_key_value_heads", None)


def _one_layer_of_each_kind(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Two layers, or as many as it takes to have each kind of layer once."""
    other_names = getattr(config, "attribute_map", {})
    settable = [name for name in _KINDS_OF_LAYERS if not _is_computed(config, other_names.get(name, name))]
    lists = {name: getattr(config, name) for name in settable if isinstance(getattr(config, name, None), list | tuple)}
    lists = {name: kinds for name, kinds in lists.items() if kinds and all(isinstance(kind, str) for kind in kinds)}
    if not lists:
        return
    length = max(2, *(len(dict.fromkeys(kinds)) for kinds in lists.values()))
    for name, kinds in lists.items():
        distinct = list(dict.fromkeys(kinds))
        values[name] = (distinct * length)[:length] if len(distinct) > 1 else distinct * length
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        if name in values:
            values[name] = length


def _is_computed(config: PretrainedConfig, name: str) -> bool:
    return isinstance(getattr(type(config), name, None), property)


def _special_tokens(config: PretrainedConfig, values: dict[str, Any]) -> None:
    """Ids of placeholders that would lie beyond the small vocabulary."""
    next_id = FIRST_SPECIAL_TOKEN
    for name, default in config.to_dict().items():
        is_token = name.endswith(("_token_id", "_token_index", "_token_idx")) and name not in _EXACT
        if is_token and isinstance(default, int) and not isinstance(default, bool):
            values[name] = next_id
            next_id += 1


def _merged(values: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    merged = {**values}
    for name, value in special.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged
