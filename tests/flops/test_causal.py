"""The causal convention holds the same whatever way the count is made."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import flopwatch
from flopwatch.models.load import dummy_batch, load_model


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout).flatten(2)


class Model(nn.Module):
    def __init__(self, dropout: float, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.block = Block(dropout)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)


LENGTH = 10
PROJECTIONS = 2 * 3 * LENGTH * (16 * 16 * 2 + 16 * 48 * 3)  # the first layer's input needs no gradient
ATTENTION = 3 * 3 * 2 * 2 * 2 * LENGTH * (LENGTH + 1) // 2 * 8  # 3 samples, 3 passes, 2 products, 2 heads of 8


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_trace_counts_the_triangle(dropout: float, reentrant: bool | None) -> None:
    count = flopwatch.count_flops(Model(dropout, reentrant), torch.randn(3, LENGTH, 16), attention="causal")

    assert (count.model_flops, count.method) == (PROJECTIONS + ATTENTION, "trace")
    assert (count.coverage, count.notes, count.attention) == (1.0, (), "causal")


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_a_fused_kernel_counts_the_same_in_a_real_step(reentrant: bool | None) -> None:
    batch, options = torch.randn(3, LENGTH, 16), {"attention": "causal"}
    trace = flopwatch.count_flops(Model(0.0, reentrant), batch, method="trace", **options)  # type: ignore[arg-type]
    step = flopwatch.count_flops(Model(0.0, reentrant), batch, method="step", **options)  # type: ignore[arg-type]

    assert (trace.model_flops, trace.hardware_flops) == (step.model_flops, step.hardware_flops)


def test_a_step_that_takes_attention_apart_reads_the_mask() -> None:
    count = flopwatch.count_flops(Model(0.1, None), torch.randn(3, LENGTH, 16), method="step", attention="causal")

    assert (count.model_flops, count.attention, count.notes) == (PROJECTIONS + ATTENTION, "causal", ())


@pytest.mark.parametrize("method", ["trace", "estimate"])
def test_presets_are_causal(method: Any) -> None:
    model = load_model("tiny")
    batch = dummy_batch(model, 1, 64)
    full = flopwatch.count_flops(model, batch, method=method).model_flops
    causal = flopwatch.count_flops(model, batch, method=method, attention="causal")

    masked_pairs = 64 * 64 - 64 * 65 // 2
    assert full - causal.model_flops == 2 * 3 * 2 * 2 * masked_pairs * 64
    assert causal.attention == "causal"
