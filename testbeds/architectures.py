"""Small models of many architectures, built as a user builds them, each with a batch and an independent FLOP count.

The truth runs the same model with eager attention and eager experts for real on the CPU under torch's own counter:
there every product is an mm, bmm or convolution that torch knows. torch counts the backward of grouped convolutions
wrong, so for that one op the closed formula stands in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Batch = dict[str, Any]
Kind = Literal[
    "dense decoder", "MoE decoder", "linear attention", "encoder", "encoder-decoder", "vision", "audio", "VLM"
]

SEED = 0
IMAGE_TOKEN = 9


@dataclass(frozen=True)
class Architecture:
    """How to build one model and a batch for it."""

    name: str
    kind: Kind
    model_class: str
    config_class: str
    config: Callable[[], dict[str, Any]]
    batch: Callable[[int, int], Batch]
    """Batch size and length to a batch; models without a length ignore it."""

    def absence(self) -> str | None:
        """Why this release of transformers cannot build it; None if it can."""
        missing = [name for name in (self.model_class, self.config_class) if not hasattr(transformers, name)]
        return f"transformers {transformers.__version__} has no {missing[0]}" if missing else None

    def build(self, *, eager: bool = False) -> nn.Module:
        """The model in training mode; `eager` swaps attention and experts for the ones torch can count."""
        config = getattr(transformers, self.config_class)(**self.config())
        if eager:
            config._attn_implementation = "eager"
        torch.manual_seed(SEED)
        model: nn.Module = getattr(transformers, self.model_class)(config)
        # Before transformers 5 experts had no second implementation: they were eager always.
        if eager and _has_experts(config) and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # type: ignore[operator]
        return model.train()

    def untraceable(self) -> str | None:
        """Why no trace can count this model; None if one can."""
        config = getattr(transformers, self.config_class)(**self.config())
        if _has_experts(config) and not hasattr(transformers.PreTrainedModel, "set_experts_implementation"):
            return f"experts of transformers {transformers.__version__} read which tokens they get"
        return None


def _has_experts(config: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names) and config.model_type != "switch_transformers"


def closed_convolution_backward(
    grad_shape: Any,
    x_shape: Any,
    w_shape: Any,
    _bias: Any,
    _s: Any,
    _p: Any,
    _d: Any,
    transposed: bool,
    *args: Any,
    **_: Any,
) -> int:
    """Both gradients take each product of the forward pass once: 2 x positions x weights."""
    output_mask = args[2]
    positions = prod((x_shape if transposed else grad_shape)[2:])
    return int(2 * x_shape[0] * positions * prod(w_shape) * (output_mask[0] + output_mask[1]))


def closed_triangular_solve(a_shape: Any, b_shape: Any, *_: Any, unitriangular: bool = False, **__: Any) -> int:
    """Substitution row by row: i multiply-adds, and a division unless the diagonal is ones. torch has no formula."""
    rows = range(a_shape[-1])
    per_side = sum(2 * row + (not unitriangular) for row in rows)
    return int(per_side * (prod(b_shape) // a_shape[-1]))


def true_flops(model: nn.Module, batch: Batch, loss_fn: Callable[[Any], torch.Tensor] | None = None) -> int:
    """Forward and backward of an eager model, run for real, counted by torch."""
    torch.manual_seed(SEED)
    mapping = {
        torch.ops.aten.convolution_backward: closed_convolution_backward,
        torch.ops.aten.linalg_solve_triangular: closed_triangular_solve,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        output = model(**batch)
        (loss_fn(output) if loss_fn else output.loss).backward()
    model.zero_grad()
    return int(counter.get_total_flops())


def text_sizes(**extra: Any) -> dict[str, Any]:
    """Sizes most text models of transformers understand."""
    return {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **extra,
    }


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _ids(batch_size: int, seq_len: int) -> torch.Tensor:
    return torch.randint(10, 128, (batch_size, seq_len), generator=_generator())


def causal_batch(batch_size: int, seq_len: int) -> Batch:
    ids = _ids(batch_size, seq_len)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def image_batch(batch_size: int, _: int, *, size: int = 32, labels: tuple[int, ...] = ()) -> Batch:
    return {
        "pixel_values": torch.randn(batch_size, 3, size, size, generator=_generator()),
        "labels": torch.randint(0, 2, (batch_size, *labels), generator=_generator()),
    }


def _clip_batch(batch_size: int, seq_len: int) -> Batch:
    ids = _ids(batch_size, seq_len)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(batch_size, 3, 32, 32, generator=_generator()),
        "return_loss": True,
    }


def _llava_batch(batch_size: int, seq_len: int) -> Batch:
    batch = causal_batch(batch_size, seq_len)
    batch["input_ids"][:, 1:17] = IMAGE_TOKEN  # 16 patches of 8 x 8 in a 32 x 32 image
    return {**batch, "pixel_values": torch.randn(batch_size, 3, 32, 32, generator=_generator())}


def qwen_vl_batch(batch_size: int, seq_len: int, grid: tuple[int, int, int] = (1, 4, 6)) -> Batch:
    """One image of `grid` patches per sample, merged two by two into placeholders."""
    batch = causal_batch(batch_size, seq_len)
    patches = prod(grid)
    batch["input_ids"][:, 1 : 1 + patches // 4] = IMAGE_TOKEN
    types = (batch["input_ids"] == IMAGE_TOKEN).int()
    return {
        **batch,
        "mm_token_type_ids": types,
        "pixel_values": torch.randn(batch_size * patches, 3 * 2 * 8 * 8, generator=_generator()),
        "image_grid_thw": torch.tensor([grid] * batch_size),
    }


def _whisper_batch(batch_size: int, seq_len: int) -> Batch:
    return {
        "input_features": torch.randn(batch_size, 16, 64, generator=_generator()),
        "labels": _ids(batch_size, seq_len),
    }


def _wav2vec2_batch(batch_size: int, _: int) -> Batch:
    return {
        "input_values": torch.randn(batch_size, 2000, generator=_generator()),
        "labels": torch.randint(1, 30, (batch_size, 5), generator=_generator()),
    }


def _seq2seq_batch(batch_size: int, seq_len: int) -> Batch:
    return {**causal_batch(batch_size, seq_len), "labels": _ids(batch_size, max(2, seq_len // 2))}


_VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


def _qwen2_vl_config() -> dict[str, Any]:
    name = "rope_parameters" if hasattr(transformers.LlamaConfig(), "rope_parameters") else "rope_scaling"
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    return {
        "text_config": text_sizes(**{name: rope}),
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 8,
        "vision_start_token_id": 7,
        "vision_end_token_id": 6,
    }


def _qwen2_5_vl_config() -> dict[str, Any]:
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "num_heads": 4,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
    }
    return {**_qwen2_vl_config(), "vision_config": vision}


ARCHITECTURES = [
    Architecture(
        "gpt2",
        "dense decoder",
        "GPT2LMHeadModel",
        "GPT2Config",
        lambda: {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
        causal_batch,
    ),
    Architecture(
        "gpt_neox",
        "dense decoder",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        text_sizes,
        causal_batch,
    ),
    Architecture("llama", "dense decoder", "LlamaForCausalLM", "LlamaConfig", text_sizes, causal_batch),
    Architecture("mistral", "dense decoder", "MistralForCausalLM", "MistralConfig", text_sizes, causal_batch),
    Architecture("phi3", "dense decoder", "Phi3ForCausalLM", "Phi3Config", text_sizes, causal_batch),
    Architecture("olmo2", "dense decoder", "Olmo2ForCausalLM", "Olmo2Config", text_sizes, causal_batch),
    Architecture(
        "qwen3", "dense decoder", "Qwen3ForCausalLM", "Qwen3Config", lambda: text_sizes(head_dim=16), causal_batch
    ),
    Architecture(
        "gemma3",
        "dense decoder",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        lambda: text_sizes(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        causal_batch,
    ),
    Architecture(
        "mixtral",
        "MoE decoder",
        "MixtralForCausalLM",
        "MixtralConfig",
        lambda: text_sizes(num_local_experts=4),
        causal_batch,
    ),
    Architecture(
        "qwen3_moe",
        "MoE decoder",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        lambda: text_sizes(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48),
        causal_batch,
    ),
    Architecture(
        "deepseek_v3",
        "MoE decoder",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        lambda: text_sizes(
            num_key_value_heads=4,
            num_hidden_layers=3,
            moe_intermediate_size=32,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        causal_batch,
    ),
    Architecture(
        "gpt_oss",
        "MoE decoder",
        "GptOssForCausalLM",
        "GptOssConfig",
        lambda: text_sizes(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        causal_batch,
    ),
    Architecture(
        "mamba2",
        "linear attention",
        "Mamba2ForCausalLM",
        "Mamba2Config",
        lambda: {
            "vocab_size": 128,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        causal_batch,
    ),
    Architecture(
        "qwen3_next",
        "linear attention",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        lambda: text_sizes(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
        ),
        causal_batch,
    ),
    Architecture("bert", "encoder", "BertForMaskedLM", "BertConfig", text_sizes, causal_batch),
    Architecture(
        "t5",
        "encoder-decoder",
        "T5ForConditionalGeneration",
        "T5Config",
        lambda: {
            "vocab_size": 128,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        _seq2seq_batch,
    ),
    Architecture(
        "vit",
        "vision",
        "ViTForImageClassification",
        "ViTConfig",
        lambda: {**_VISION, "image_size": 32, "patch_size": 8},
        image_batch,
    ),
    Architecture(
        "convnext",
        "vision",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        lambda: {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]},
        image_batch,
    ),
    Architecture(
        "resnet",
        "vision",
        "ResNetForImageClassification",
        "ResNetConfig",
        lambda: {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]},
        image_batch,
    ),
    Architecture(
        "segformer",
        "vision",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        lambda: {
            "hidden_sizes": [16, 32, 64, 64],
            "depths": [1, 1, 1, 1],
            "decoder_hidden_size": 32,
            "num_attention_heads": [1, 2, 4, 4],
        },
        lambda batch_size, _: image_batch(batch_size, 0, size=64, labels=(64, 64)),
    ),
    Architecture(
        "clip",
        "vision",
        "CLIPModel",
        "CLIPConfig",
        lambda: {
            "text_config": {**_VISION, "vocab_size": 128, "eos_token_id": 2, "bos_token_id": 1},
            "vision_config": {**_VISION, "image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
        _clip_batch,
    ),
    Architecture(
        "llava",
        "VLM",
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        lambda: {
            "text_config": {"model_type": "llama", **text_sizes()},
            "vision_config": {"model_type": "clip_vision_model", **_VISION, "image_size": 32, "patch_size": 8},
            "image_token_id": IMAGE_TOKEN,
        },
        _llava_batch,
    ),
    Architecture(
        "qwen2_vl",
        "VLM",
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        _qwen2_vl_config,
        qwen_vl_batch,
    ),
    Architecture(
        "qwen2_5_vl",
        "VLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        _qwen2_5_vl_config,
        qwen_vl_batch,
    ),
    Architecture(
        "whisper",
        "audio",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {
            "vocab_size": 128,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
        _whisper_batch,
    ),
    Architecture(
        "wav2vec2",
        "audio",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        lambda: {
            **_VISION,
            "vocab_size": 32,
            "conv_dim": (32, 32),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        _wav2vec2_batch,
    ),
]

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
