"""The campaign beyond CI: more architectures than the table has, each counted against the same truth.

python benchmarks/accuracy/more_architectures.py [name ...]
"""

import logging
import sys
import warnings
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import flopwatch
from testbeds.architectures import SEED, Architecture, causal_batch, image_batch, text_sizes, true_flops

_GPT = {"vocab_size": 128, "n_layer": 2, "n_head": 4}
_GLOBAL_THEN_LOCAL = [[["global", "local"], 1]]
_NO_KV = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SEQ2SEQ = {
    "vocab_size": 128, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_STAGES = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
_LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip

TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", "OPTConfig", text_sizes(ffn_dim=96, word_embed_proj_dim=64)),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_GPT, "hidden_size": 64}),
    "falcon": ("FalconForCausalLM", "FalconConfig", text_sizes(**_NO_KV)),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "n_embd": 64, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": 128, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "attention_types": _GLOBAL_THEN_LOCAL},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", text_sizes()),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", text_sizes()),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", text_sizes(head_dim=16)),
    "cohere": ("CohereForCausalLM", "CohereConfig", text_sizes()),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", text_sizes()),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", text_sizes()),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 128, "d_model": 64, "n_heads": 4, "n_layers": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", text_sizes(**_EXPERTS, shared_expert_intermediate_size=32)),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", text_sizes(num_experts=4, num_experts_per_tok=2)),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", text_sizes(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", text_sizes(**_LATENT)),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        text_sizes(head_dim=16, **{**_LATENT, "num_key_value_heads": 2}),
    ),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig", text_sizes(head_dim=16, num_local_experts=2, intermediate_size_mlp=96),
    ),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        text_sizes(
            num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False,
            mamba_d_state=8,
        ),
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2}),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", text_sizes(lru_width=64, attention_window_size=16),
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", text_sizes()),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 128, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", text_sizes(embedding_size=32)),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", text_sizes(embedding_size=32)),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", text_sizes()),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig", text_sizes(cls_token_id=1, sep_token_id=2, local_attention=8),
    ),
    "longformer": ("LongformerForMaskedLM", "LongformerConfig", text_sizes(attention_window=8)),
    "big_bird": ("BigBirdForMaskedLM", "BigBirdConfig", text_sizes()),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", text_sizes()),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {**_GPT, "d_model": 64, "d_inner": 96}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", _SEQ2SEQ),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_experts": 4,
            "pad_token_id": 0, "decoder_start_token_id": 0, "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
    ),
}  # fmt: skip
IMAGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "beit": ("BeitForImageClassification", "BeitConfig", _VISION),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _VISION),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _VISION),
    "siglip": ("SiglipForImageClassification", "SiglipConfig", {"vision_config": _VISION}),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", {"depth_multiplier": 0.35}),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", {**_STAGES, "embedding_size": 16, "groups_width": 8}),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", _STAGES),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", _STAGES),
}


def architectures() -> list[Architecture]:
    text = [Architecture(name, "encoder", *row[:2], partial(dict, row[2]), causal_batch) for name, row in TEXT.items()]
    images = [
        Architecture(name, "vision", *row[:2], partial(dict, row[2]), image_batch) for name, row in IMAGES.items()
    ]
    return text + images


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    chosen = [item for item in architectures() if not sys.argv[1:] or item.name in sys.argv[1:]]
    table = Table("architecture", "truth", "flopwatch", "method", "coverage", "estimate")
    exact = 0
    for item in track(chosen, "Counting"):
        batch = item.batch(2, 32)
        truth = true_flops(item.build(eager=True), batch)
        flopwatch_count = _count(item, batch, "auto")
        exact += flopwatch_count.model_flops == truth
        estimate = _count(item, batch, "estimate").model_flops / truth - 1
        verdict = "exact" if flopwatch_count.model_flops == truth else f"{flopwatch_count.model_flops / truth:.4f} x"
        coverage = f"{flopwatch_count.coverage:.0%}"
        table.add_row(item.name, f"{truth:,}", verdict, flopwatch_count.method, coverage, f"{estimate:+.1%}")
    Console().print(table, f"{exact} of {len(chosen)} exact")


def _count(item: Architecture, batch: dict[str, Any], method: Any) -> flopwatch.FlopCount:
    model = item.build()
    torch.manual_seed(SEED)
    return flopwatch.count_flops(model, batch, method=method)


if __name__ == "__main__":
    main()
