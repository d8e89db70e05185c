"""The models of published rows: their sizes, and where these are stated. Nothing is fitted to a published figure."""

from dataclasses import dataclass, field
from typing import Any

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/models"
_LLAMA = f"{_BRIDGE}/llama/llama_provider.py (2afd2d34); vocabulary of 128,256: Meta's config.json"
_LLAMA_2 = f"{_BRIDGE}/llama/llama_provider.py (2afd2d34); vocabulary of 32,000: MaxText llama2-70b.yml (0b7d1ee4)"
_QWEN = f"{_BRIDGE}/qwen/qwen_provider.py (07d0d14a)"
_DEEPSEEK = f"{_BRIDGE}/deepseek/deepseek_provider.py (066adea0)"
_KIMI = f"{_BRIDGE}/kimi/kimi_provider.py (1e591140)"
_GPT_OSS = f"{_BRIDGE}/gpt_oss/gpt_oss_provider.py (12bc34a8)"
_NEMOTRON = f"{_BRIDGE}/nemotronh/nemotron_h_provider.py (160ccccb); vocabulary of 131,072: default of transformers"
_MIXTRAL = "AI-Hypercomputer/maxtext MaxText/configs/models"
_MPT = "mosaicml/llm-foundry scripts/train/yamls/mpt (d4bf3c38 and others); the number of parameters is that of the row"


@dataclass(frozen=True, slots=True)
class Model:
    """A class of transformers' configurations with its settings."""

    config: str
    settings: dict[str, Any]
    source: str
    learned_positions: bool = field(default=False, kw_only=True)
    """Whether the table of positions has the length of the row."""


def _llama(width: int, feed_forward: int, layers: int, heads: int, vocabulary: int, groups: int = 8) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
    }


def _qwen3(width: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = _llama(width, 3 * width, layers, heads, 151_936, 4)
    return sizes | {"moe_intermediate_size": expert, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}


def _deepseek(**settings: int) -> dict[str, Any]:
    sizes = _llama(7168, 18_432, 61, 128, 129_280, 128)
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    experts = {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8}
    groups = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "v_head_dim": 128}
    return sizes | latent | experts | groups | settings


_KIMI_K2 = {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "vocab_size": 163_840}
_KIMI_K2 |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def _gpt_oss(layers: int, experts: int, **settings: Any) -> dict[str, Any]:
    sizes = _llama(2880, 2880, layers, 64, 201_088)
    sizes |= {"head_dim": 64, "sliding_window": 128, "num_local_experts": experts, "num_experts_per_tok": 4}
    return sizes | settings


# As many columns as 64 and 8 heads of 45, which is odd and so has no rotary embedding.
_OF_45 = {"num_attention_heads": 72, "num_key_value_heads": 9, "head_dim": 40}


def _nemotron(pattern: str, width: int, mamba_heads: int, **settings: int) -> dict[str, Any]:
    """The hybrids of state spaces, attention and experts; `pattern` has a letter per layer."""
    attention = {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131_072}
    states = {"mamba_num_heads": mamba_heads, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
    return {"hybrid_override_pattern": pattern, "hidden_size": width, **attention, **states, **settings}


_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NANO_EXPERTS = {"n_routed_experts": 128, "moe_intermediate_size": 1856, "num_experts_per_tok": 6}
_NANO_EXPERTS |= {"moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856}
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER_EXPERTS = {"n_routed_experts": 512, "moe_intermediate_size": 2688, "num_experts_per_tok": 22}
_SUPER_EXPERTS |= {"moe_shared_expert_intermediate_size": 5376, "intermediate_size": 2688, "moe_latent_size": 1024}
# Two further predictions, each a layer of attention and one of experts (`mtp_hybrid_override_pattern`, two depths).
_SUPER_PREDICTIONS = "*E" * 2


# As MPT trains. On the CPU, where a trace runs, attention with dropout is not fused and makes a mask of all pairs.
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def _mpt(width: int, layers: int, heads: int) -> Model:
    """MPT with learned positions, biases and a shared table has GPT-2's layers, and exactly its parameters."""
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": 50_368, **_NO_DROPOUT}
    return Model("GPT2Config", sizes, _MPT, learned_positions=True)


MODELS = {
    "Llama 3 8B": Model("LlamaConfig", _llama(4096, 14_336, 32, 32, 128_256), _LLAMA),
    "Llama 3 70B": Model("LlamaConfig", _llama(8192, 28_672, 80, 64, 128_256), _LLAMA),
    "Llama 3 405B": Model("LlamaConfig", _llama(16_384, 53_248, 126, 128, 128_256), _LLAMA),
    "Llama 2 7B": Model("LlamaConfig", _llama(4096, 11_008, 32, 32, 32_000, 32), _LLAMA_2),
    "Llama 2 13B": Model("LlamaConfig", _llama(5120, 13_824, 40, 40, 32_000, 40), _LLAMA_2),
    "Llama 2 70B": Model("LlamaConfig", _llama(8192, 28_672, 80, 64, 32_000), _LLAMA_2),
    "Qwen2.5 7B": Model("Qwen2Config", _llama(3584, 18_944, 28, 28, 152_064, 4), _QWEN),
    "Qwen2.5 32B": Model("Qwen2Config", _llama(5120, 27_648, 64, 40, 152_064), _QWEN),
    "Qwen3 30B": Model("Qwen3MoeConfig", _qwen3(2048, 768, 48, 32), _QWEN),
    "Qwen3 235B": Model("Qwen3MoeConfig", _qwen3(4096, 1536, 94, 64), _QWEN),
    "DeepSeek V3": Model("DeepseekV3Config", _deepseek(), _DEEPSEEK),
    "DeepSeek V3, 62 layers": Model("DeepseekV3Config", _deepseek(num_hidden_layers=62), _DEEPSEEK),
    "Kimi K2": Model("DeepseekV3Config", _deepseek(**_KIMI_K2), _KIMI),
    "GPT-OSS 20B": Model("GptOssConfig", _gpt_oss(24, 32), _GPT_OSS),
    "GPT-OSS 120B": Model("GptOssConfig", _gpt_oss(36, 128), _GPT_OSS),
    "GPT-OSS 20B, heads of 45": Model("GptOssConfig", _gpt_oss(24, 32, **_OF_45), _GPT_OSS),
    "GPT-OSS 120B, heads of 45": Model("GptOssConfig", _gpt_oss(36, 128, **_OF_45), _GPT_OSS),
    "GPT-OSS 120B, no windows": Model("GptOssConfig", _gpt_oss(36, 128, layer_types=["full_attention"] * 36), _GPT_OSS),
    "Nemotron 3 Nano": Model("NemotronHConfig", _nemotron(_NANO, 2688, 64, **_NANO_EXPERTS), _NEMOTRON),
    "Nemotron 3 Nano, heads of 84": Model(
        "NemotronHConfig", _nemotron(_NANO, 2688, 64, **_NANO_EXPERTS) | {"head_dim": 84}, _NEMOTRON
    ),
    "Nemotron 3 Super": Model(
        "NemotronHConfig", _nemotron(_SUPER + _SUPER_PREDICTIONS, 4096, 128, **_SUPER_EXPERTS), _NEMOTRON
    ),
    "Mixtral 8x7B": Model(
        "MixtralConfig", _llama(4096, 14_336, 32, 32, 32_000), f"{_MIXTRAL}/mixtral-8x7b.yml (09c45a75)"
    ),
    "Mixtral 8x22B": Model(
        "MixtralConfig", _llama(6144, 16_384, 56, 48, 32_768), f"{_MIXTRAL}/mixtral-8x22b.yml (13ddcbf9)"
    ),
    "MPT 125m": _mpt(768, 12, 12),
    "MPT 350m": _mpt(1024, 24, 16),
    "MPT 760m": _mpt(1536, 24, 12),
    "MPT 1b": _mpt(2048, 24, 16),
    "MPT 3b": _mpt(2560, 32, 20),
    "MPT 7b": _mpt(4096, 32, 32),
    "MPT 13b": _mpt(5120, 40, 40),
    "MPT 30b": _mpt(7168, 48, 56),
    "MPT 70b": _mpt(8192, 80, 64),
}
