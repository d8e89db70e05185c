"""FLOPs by a publisher's convention equal the publisher's own formula, written out here from its source."""

from typing import Any

import pytest
import torch
from torch import nn

from flopwatch.flops import flops_by_convention

transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH, WIDTH, HEADS, GROUPS, LAYERS, VOCABULARY = 2, 64, 64, 4, 2, 2, 128
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 48
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
TOKENS = SAMPLES * LENGTH


def built(kind: str, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
            getattr(transformers, kind)(**SIZES | settings)
        ).train()


def dense(**settings: Any) -> nn.Module:
    return built("LlamaConfig", **settings)


def with_experts() -> nn.Module:
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_WIDTH}
    return built("Qwen3MoeConfig", head_dim=WIDTH // HEADS, **experts)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def megatron(*, feed_forward: int) -> float:
    """`transformer_flops` of Megatron-Bridge, with the exact triangle of pairs in place of half the square."""
    projections = WIDTH * (WIDTH + 2 * WIDTH * GROUPS // HEADS) + WIDTH * WIDTH
    core = 2 * WIDTH * (LENGTH + 1) / 2
    return 6 * TOKENS * (LAYERS * (projections + core + 3 * WIDTH * feed_forward) + WIDTH * VOCABULARY)


def parameters(model: nn.Module, without: str = "embed_tokens") -> int:
    return sum(each.numel() for name, each in model.named_parameters() if without not in name)


ALL_PAIRS = 12 * LAYERS * WIDTH * LENGTH  # FLOPs per token, 12 L H Q T


@pytest.mark.slow
def test_megatron_halves_attention() -> None:
    found = flops_by_convention(dense(), batch(), "megatron")

    assert (found.flops, found.attention, found.why_not) == (megatron(feed_forward=160), "causal", None)
    assert "flop_utils.py" in found.source


@pytest.mark.slow
def test_megatron_leaves_out_routers_and_maxtext_does_not() -> None:
    model = with_experts()
    without = flops_by_convention(model, batch(), "megatron").flops
    with_routers = flops_by_convention(model, batch(), "maxtext").flops

    assert without == megatron(feed_forward=CHOSEN * EXPERT_WIDTH)
    assert with_routers == without + 6 * TOKENS * LAYERS * WIDTH * EXPERTS


@pytest.mark.parametrize("name", ["torchtitan", "palm"])
def test_all_parameters_but_the_embeddings_count_six(name: str) -> None:
    model = dense()

    assert flops_by_convention(model, batch(), name).flops == TOKENS * (6 * parameters(model) + ALL_PAIRS)


@pytest.mark.parametrize("tied", [False, True])
def test_llm_foundry_counts_six_for_every_parameter(tied: bool) -> None:
    model = dense(tie_word_embeddings=tied)
    every = sum(each.numel() for each in model.parameters())

    assert flops_by_convention(model, batch(), "llm-foundry").flops == TOKENS * (6 * every + ALL_PAIRS)


@pytest.mark.slow
def test_torchtitan_counts_the_parameters_that_a_token_uses() -> None:
    model = with_experts()
    in_experts = parameters(model) - parameters_outside_of_experts(model)
    used = parameters_outside_of_experts(model) + in_experts * CHOSEN // EXPERTS

    assert flops_by_convention(model, batch(), "torchtitan").flops == TOKENS * (6 * used + ALL_PAIRS)


def parameters_outside_of_experts(model: nn.Module) -> int:
    return sum(
        each.numel() for name, each in model.named_parameters() if not {"embed_tokens", "experts"} & {*name.split(".")}
    )


@pytest.mark.slow
def test_a_sliding_window_counts_its_pairs_by_megatron_only() -> None:
    window = 16
    plain, narrow = built("MistralConfig", sliding_window=None), built("MistralConfig", sliding_window=window)
    pairs = LENGTH * (LENGTH + 1) // 2 - (window * (window + 1) // 2 + (LENGTH - window) * window)
    fewer = 6 * 2 * SAMPLES * LAYERS * WIDTH * pairs

    assert value(plain, "megatron") - value(narrow, "megatron") == fewer
    assert value(plain, "palm") == value(narrow, "palm")


def value(model: nn.Module, name: str) -> int:
    flops = flops_by_convention(model, batch(), name).flops
    assert flops is not None
    return flops


class FromScratch(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(32, 16), nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.tokens(ids)).sum()  # type: ignore[no-any-return]


class MaskOfActivations(FromScratch):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)[:, None]
        kept = nn.functional.scaled_dot_product_attention(x, x, x, x.mean(-1, keepdim=True) > 0)
        return nn.functional.scaled_dot_product_attention(kept, kept, kept, is_causal=True).sum()


def frozen() -> nn.Module:
    model = dense()
    next(iter(model.parameters())).requires_grad_(False)
    return model


def all_experts() -> nn.Module:
    """Llama 4 as transformers runs it: every token runs through every expert, most of them with a weight of 0."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 160, "pad_token_id": 0}
    return built("Llama4TextConfig", head_dim=WIDTH // HEADS, **sizes)


def linear_attention() -> nn.Module:
    return built("MiniMaxConfig", num_local_experts=4, block_size=16, pad_token_id=0)


def experts_in_part_of_the_configuration() -> nn.Module:
    model = FromScratch(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))
    model.config = transformers.LlamaConfig()
    model.config.ffn_config = transformers.PretrainedConfig(moe_num_experts=EXPERTS)
    return model


IDS = torch.zeros(2, 8, dtype=torch.long)
UNKNOWN = "not known which products of the model are attention"
UNDEFINED: dict[str, tuple[Any, Any, str, str]] = {
    "frozen parameters": (frozen, batch(), "megatron", "8,192 parameters are not trained"),
    "experts by PaLM": (with_experts, batch(), "palm", "does not define models with experts"),
    "experts by llm-foundry": (with_experts, batch(), "llm-foundry", "does not define models with experts"),
    "experts in a part of the configuration, as of DBRX": (
        experts_in_part_of_the_configuration,
        IDS,
        "palm",
        "does not define models with experts",
    ),
    "every token in every expert": (all_experts, batch(), "torchtitan", UNKNOWN),
    "every token in every expert, without routers": (all_experts, batch(), "megatron", UNKNOWN),
    "linear attention": (linear_attention, batch(), "maxtext", UNKNOWN),
    "nothing like attention": (lambda: FromScratch(nn.Linear(16, 16)), IDS, "palm", UNKNOWN),
    "a mask that depends on activations": (
        MaskOfActivations,
        IDS,
        "maxtext",
        "not all masks of attention could be read",
    ),
    "a convolution": (lambda: FromScratch(nn.Conv1d(8, 8, 3)), IDS, "palm", "also runs convolution"),
    "no attention": (lambda: FromScratch(nn.Linear(16, 16)), IDS, "megatron", "no mask of attention could be read"),
    "attention to both sides": (
        lambda: FromScratch(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        IDS,
        "megatron",
        "has no mask",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNDEFINED)
def test_what_a_convention_does_not_define_has_a_reason_and_no_figure(name: str) -> None:
    build, given, convention, reason = UNDEFINED[name]
    found = flops_by_convention(build(), given, convention)

    assert found.flops is None
    assert reason in (found.why_not or "")
