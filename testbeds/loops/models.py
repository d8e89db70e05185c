"""Models that train in milliseconds."""

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

WIDTH = 8


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def sgd(*modules: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight for module in modules for weight in module.parameters()], lr=lr)


class Attention(nn.Module):
    """One head, taken apart into products, so that torch's table sees them all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(hidden).chunk(3, -1)
        return self.out((query @ key.mT).softmax(-1) @ value)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.wide = mlp(width, 2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.wide(hidden)


class TinyGPT(nn.Module):
    """As nanoGPT: `model(ids, targets)` returns `(logits, loss)`."""

    def __init__(self, blocks: int = 2, words: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, words)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def ids(*shape: int, words: int = 20) -> torch.Tensor:
    return torch.randint(0, words, shape)


def llama(**more: Any) -> nn.Module:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **(sizes | heads | more), attn_implementation="eager", pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    return transformers.LlamaForCausalLM(config).train()


def text(rows: int, length: int, words: int = 32) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, words, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def cnn(channels: int = 4) -> nn.Sequential:
    """With a depthwise convolution, whose backward pass torch's own formula has wrong."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 5),
    )
