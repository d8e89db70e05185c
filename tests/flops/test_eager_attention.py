"""Attention that a model writes as plain products leaves out the pairs of the mask that the model itself has built."""

from typing import Any

import pytest
import torch
from torch import nn

import flopwatch
from flopwatch.flops.tracing.counter import UNMASKED_PRODUCTS

transformers = pytest.importorskip("transformers")

LENGTH, WINDOW, HEADS, WIDTH, LAYERS = 48, 16, 4, 16, 2
SIZES: dict[str, Any] = {
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal": ("LlamaConfig", {}),
    "sliding window in every layer": ("MistralConfig", {"sliding_window": WINDOW}),
    "sliding window in every second layer, with sinks": (
        "GptOssConfig",
        {"sliding_window": WINDOW, "head_dim": WIDTH, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "chunks": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "head_dim": WIDTH,
            "intermediate_size_mlp": 32,
            "pad_token_id": 0,
            "layer_types": ["chunked_attention", "full_attention"],
            "moe_layers": [],
        },
    ),
}


def built(name: str, device: str = "meta", **more: Any) -> nn.Module:
    kind, settings = CONFIGS[name]
    config = getattr(transformers, kind)(**SIZES, **settings, **more)
    config._attn_implementation = "eager"
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]


def batch(samples: int = 1, length: int = LENGTH) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def allowed_pairs(model: nn.Module, mask: torch.Tensor | None = None) -> int:
    """The pairs of all layers, from the masks that transformers builds for this configuration with real tensors."""
    from transformers.masking_utils import create_masks_for_generate

    embeds = torch.zeros(1 if mask is None else mask.shape[0], LENGTH, 8)
    masks = create_masks_for_generate(model.config, embeds, mask, None)
    kinds = getattr(model.config, "layer_types", None) or ["all"] * LAYERS
    return sum(int((masks[kind] if isinstance(masks, dict) else masks).eq(0).sum()) for kind in kinds)


def left_out(model: nn.Module, of: dict[str, torch.Tensor], **options: Any) -> tuple[int, flopwatch.FlopCount]:
    full = flopwatch.count_flops(model, of, attention="full", **options)
    causal = flopwatch.count_flops(model, of, attention="causal", **options)
    return full.model_flops - causal.model_flops, causal


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_trace_counts_the_pairs_of_the_real_mask(name: str) -> None:
    model = built(name)
    saved, causal = left_out(model, batch())

    masked = LAYERS * LENGTH * LENGTH - allowed_pairs(model)
    assert saved == 3 * 2 * 2 * HEADS * WIDTH * masked  # three passes, two products, multiply and add
    assert (causal.attention, causal.notes) == ("causal", ())
    assert all(flops.total > 0 for flops in causal.by_module.values())


@pytest.mark.slow
def test_a_real_step_and_recomputation_leave_out_the_same_pairs() -> None:
    traced = left_out(built("sliding window in every layer"), batch())[0]
    model = built("sliding window in every layer", "cpu")

    assert left_out(model, batch(), method="step")[0] == traced
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    saved, causal = left_out(model, batch(), method="trace")
    full = flopwatch.count_flops(model, batch(), method="trace")
    assert saved == traced
    assert full.recompute_flops - causal.recompute_flops == traced // 3  # the forward pass once more


@pytest.mark.slow
def test_eager_attention_counts_what_fused_attention_counts() -> None:
    eager = flopwatch.count_flops(built("sliding window in every layer"), batch(2), attention="causal")
    model = built("sliding window in every layer")
    model.set_attn_implementation("sdpa")  # type: ignore[operator]

    assert flopwatch.count_flops(model, batch(2), attention="causal").model_flops == eager.model_flops


@pytest.mark.slow
def test_padding_is_left_out_with_the_mask() -> None:
    lengths = (LENGTH, 20)
    mask = torch.tensor([[1] * length + [0] * (LENGTH - length) for length in lengths])
    padded = flopwatch.count_flops(built("causal"), {**batch(2), "attention_mask": mask}, attention="causal")
    rows = [flopwatch.count_flops(built("causal"), batch(1, length), attention="causal") for length in lengths]

    assert padded.model_flops == sum(row.model_flops for row in rows)


@pytest.mark.slow
def test_a_mask_that_allows_all_pairs_is_known_too() -> None:
    """A law counts length 1, where a causal mask allows its only pair."""
    assert left_out(built("causal"), batch(2, 1))[1].notes == ()
    law = flopwatch.fit_flops_law(built("sliding window in every layer"), batch(2, 12), attention="causal")

    assert (law.exact, law.notes) == (True, ())


class OwnAttention(nn.Module):
    def __init__(self, mask: torch.Tensor | None, way: str) -> None:
        super().__init__()
        self.qkv, self.mask, self.way = nn.Linear(16, 48, bias=False), mask, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: PLR0912 - a branch for each way
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = query @ key.mT
        if self.way == "fill, and a mask of nothing":
            scores = scores.masked_fill(torch.zeros(10, 10, dtype=torch.bool), float("-inf")) + torch.zeros(10, 10)
        if self.way.startswith("fill"):
            scores = scores.masked_fill(~self.mask, float("-inf"))  # type: ignore[operator]
        elif self.way == "where":
            scores = torch.where(self.mask, scores, float("-inf"))  # type: ignore[arg-type]
        elif self.way == "bias":
            scores = scores + torch.linspace(-9, 9, scores.shape[-1])
        elif self.way in ("booleans added", "integers added"):
            scores = scores + (self.mask if self.way == "booleans added" else self.mask.long())  # type: ignore[union-attr]
        elif self.way == "one of two scores":
            scores = torch.where(self.mask, scores, query.sum(-1, keepdim=True).expand_as(scores))  # type: ignore[arg-type]
        elif self.way == "output without padding":
            return (scores.softmax(-1) @ value).masked_fill(self.mask[0, :, None].logical_not(), 0.0)  # type: ignore[index]
        elif self.way == "mask and activations":
            scores = scores.masked_fill(scores < 0, float("-inf")).masked_fill(~self.mask, float("-inf"))  # type: ignore[operator]
        elif self.way == "one mask twice, then none":
            for _ in range(2):
                scores = scores.masked_fill(~self.mask, float("-inf"))  # type: ignore[operator]
            return scores.softmax(-1) @ value + (query @ key.mT).softmax(-1) @ value
        elif self.way == "activations":
            scores = scores.masked_fill(scores < 0, float("-inf"))
        elif self.way == "two masks":
            scores = scores.masked_fill(~self.mask, float("-inf"))  # type: ignore[operator]
            scores = scores.masked_fill(self.mask.mT, float("-inf"))  # type: ignore[union-attr]
        elif self.way == "masked and not masked":
            masked = scores.masked_fill(~self.mask, float("-inf"))  # type: ignore[operator]
            return masked.softmax(-1) @ value + scores.softmax(-1) @ (key @ query.mT @ value)
        return scores.softmax(-1) @ value


@pytest.mark.parametrize("way", ["fill", "where", "fill, and a mask of nothing"])
def test_masks_of_own_attention_are_read(way: str) -> None:
    model = OwnAttention(torch.ones(10, 10, dtype=torch.bool).tril(), way)
    saved, causal = left_out(model, torch.zeros(3, 10, 16))  # type: ignore[arg-type]

    assert saved == 3 * 3 * 2 * 2 * 16 * (100 - 55)
    assert (causal.attention, causal.notes) == ("causal", ())


NOT_ESTABLISHED = [
    *("none", "bias", "activations", "two masks", "masked and not masked", "booleans added", "integers added"),
    *("one of two scores", "output without padding", "mask and activations", "one mask twice, then none"),
]


@pytest.mark.parametrize("way", NOT_ESTABLISHED)
def test_what_cannot_be_established_is_told_and_counted_in_full(way: str) -> None:
    model = OwnAttention(torch.ones(10, 10, dtype=torch.bool).tril(), way)
    saved, causal = left_out(model, torch.zeros(3, 10, 16))  # type: ignore[arg-type]

    assert (saved, causal.attention, causal.notes) == (0, "full", (UNMASKED_PRODUCTS,))


class WithMask(nn.Module):
    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (states @ states.mT + mask).softmax(-1) @ states


class TwoMasks(nn.Module):
    """Two layers whose masks lie in the same memory: beside each other, or one after the other."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.states, self.layers, self.way = nn.Linear(16, 16), nn.ModuleList([WithMask(), WithMask()]), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.states(x)
        causal = torch.ones(10, 10, dtype=torch.bool).tril()
        masks = [torch.zeros(10, 10).masked_fill(~each, -torch.inf) for each in (causal, causal.triu(-2))]
        both = torch.stack(masks)
        for index, layer in enumerate(self.layers):
            mask = both[index] if self.way == "beside" else masks[0].copy_(masks[index])
            states = layer(states, mask)
        return states


@pytest.mark.parametrize("way", ["beside", "after"])
def test_each_of_two_masks_in_the_same_memory_is_read(way: str) -> None:
    saved, causal = left_out(TwoMasks(way), torch.zeros(3, 10, 16))  # type: ignore[arg-type]

    assert saved == 3 * 3 * 2 * 2 * 16 * ((100 - 55) + (100 - 27))
    assert (causal.attention, causal.notes) == ("causal", ())


@torch.library.custom_op("flopwatch_tests::eager_attention", mutates_args=())
def attention_that_reads_its_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    hidden = ~torch.ones(10, 10, dtype=torch.bool).tril()
    out = (query @ key.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ value
    return out if float(out.sum()) < torch.inf else out.clone()


@attention_that_reads_its_output.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


class AttentionAsOneOp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention_that_reads_its_output(x, x, x)


def test_nothing_is_left_out_of_attention_that_could_not_be_counted() -> None:
    found = flopwatch.count_flops(AttentionAsOneOp(), torch.zeros(3, 10, 16), attention="causal", training=False)

    assert (found.model_flops, found.attention) == (0, "full")
    assert [each.op for each in found.uncounted] == ["flopwatch_tests::eager_attention"]
