"""The networks of the presets, which need nothing but torch: a GPT-style decoder and a residual network.

The residual network (He et al., arXiv 1512.03385) has group normalisation, so that DP-SGD can train it: BatchNorm mixes
the samples of a batch, and no sample would have its own gradient.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name everybody knows
from torch.utils.checkpoint import checkpoint

from flopwatch.models.presets import ImagePreset, Preset


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


_CHANNELS_PER_GROUP = 8


class ResNet(nn.Module):
    """Basic blocks of two 3 x 3 convolutions; takes images of any size, `config` names the usual one.

    Returns a dict with `logits`, and `loss` when labels are given.
    """

    def __init__(self, sizes: ImagePreset) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_size=sizes.image_size, num_channels=3, num_labels=sizes.classes)
        self.stem = _stem(sizes)
        blocks = []
        width = sizes.widths[0]
        for stage, next_width in enumerate(sizes.widths):
            for place in range(sizes.blocks_per_stage):
                blocks.append(ResidualBlock(width, next_width, stride=2 if stage and not place else 1))
                width = next_width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, sizes.classes)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the blocks' inputs and run each block a second time in the backward pass."""
        self.gradient_checkpointing = True

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        logits = self.head(x.mean((2, 3)))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


class ResidualBlock(nn.Module):
    def __init__(self, width: int, next_width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, next_width, 3, stride, padding=1, bias=False)
        self.first_norm = _norm(next_width)
        self.second = nn.Conv2d(next_width, next_width, 3, padding=1, bias=False)
        self.second_norm = _norm(next_width)
        is_same_shape = stride == 1 and width == next_width
        self.shortcut = nn.Identity() if is_same_shape else nn.Conv2d(width, next_width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def _stem(sizes: ImagePreset) -> nn.Sequential:
    """Small images keep their resolution; large ones are brought to a quarter of it first."""
    width = sizes.widths[0]
    if not sizes.has_large_stem:
        return nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), _norm(width), nn.ReLU())
    convolution = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    return nn.Sequential(convolution, _norm(width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(width // _CHANNELS_PER_GROUP, width)
