"""A small language model that can be divided in every way, its batches, and what a step of all ranks costs."""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 4
ROWS, LENGTH = 16, 24


class Block(nn.Module):
    """Attention is written out, so that torch's own counter knows all of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads: a rank may have only some of them.
        heads = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (tensor.transpose(1, 2) for tensor in heads)
        key, value = gathered(key), gathered(value)
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        fed: Tensor = self.down(F.gelu(self.up(x)))
        return x + fed


def gathered(tensor: Tensor) -> Tensor:
    """Keys or values of the whole sequence; context parallelism puts its own function here."""
    return tensor


class Part(nn.Module):
    """Some consecutive layers of the model, with the embedding before the first and the head after the last."""

    def __init__(self, first: int = 0, last: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if first == 0 else None
        self.blocks = nn.ModuleDict({str(index): Block() for index in range(first, last)})
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last == LAYERS else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(step: int) -> Tensor:
    """What all ranks together train on in one step; the length changes every few steps."""
    length = LENGTH if step % 8 < 6 else LENGTH // 2
    return torch.randint(0, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(step))


def true_flops(step: int) -> int:
    """The FLOPs of a step on the whole batch in one process, by torch's own counter."""
    return _flops_of_length(batch_of(step).shape[1])


@cache
def _flops_of_length(length: int) -> int:
    model, batch = Part(), torch.zeros(ROWS, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss_of(model(batch), batch).backward()
    return int(counter.get_total_flops())
