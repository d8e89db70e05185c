"""A plain GPT-style decoder, so that the presets need nothing but torch."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name everybody knows
from torch.utils.checkpoint import checkpoint

from flopwatch.models.presets import Preset


class Decoder(nn.Module):
    """Token embeddings, sinusoidal positions (any length), pre-norm blocks, a linear head that is not tied.

    Returns a dict with `logits`, and `loss` when labels are given.
    """

    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the blocks' inputs and run each block a second time in the backward pass."""
        self.gradient_checkpointing = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.tokens(input_ids)
        x = x + sinusoids(x.shape[1], x.shape[2], x.device).to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


class Block(nn.Module):
    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.attention = CausalAttention(sizes)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class CausalAttention(nn.Module):
    def __init__(self, sizes: Preset) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Position signals without parameters (Vaswani et al., arXiv 1706.03762, §3.5)."""
    places = torch.arange(length, device=device)[:, None]
    rates = 10_000 ** -(torch.arange(0, width, 2, device=device) / width)
    return torch.cat([torch.sin(places * rates), torch.cos(places * rates)], dim=1)
