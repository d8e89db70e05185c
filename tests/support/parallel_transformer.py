"""A small transformer that every parallel layout can train, and the global batches it is trained on."""

import random
from functools import cache
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

VOCABULARY = 64
WIDTH = 32
HEADS = 4
LAYERS = 2
LONGEST = 32
IGNORED = -100


class Attention(nn.Module):
    """Causal; `written_out` as the matrix products that torch's own counter knows."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        self.written_out = written_out

    def forward(self, x, allowed):
        # -1 heads: under tensor parallelism a rank has only some of them.
        heads = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        query, key, value = (tensor.transpose(1, 2) for tensor in heads)
        if self.written_out:
            scores = (query @ key.transpose(-1, -2)) / query.shape[-1] ** 0.5
            mixed = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value
        else:
            # Looked up in F at each call: context parallelism puts its own in this place, as torch's does.
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention = Attention(written_out)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, allowed):
        x = x + self.attention(self.attention_norm(x), allowed)
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class Transformer(nn.Module):
    """`labels` are the next tokens, not shifted again; the loss is their sum, so that parts of a batch add up."""

    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer(written_out) for index in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids, attention_mask, labels, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids) + self.positions(position_ids)
        allowed = allowed_pairs(attention_mask)
        for layer in self.layers.values():
            x = layer(x, allowed)
        return {"loss": summed_loss(self.head(self.norm(x)), labels)}


class PipelineStage(nn.Module):
    """The first or the second half of a transformer, with the names it has there."""

    def __init__(self, whole: Transformer, is_first: bool) -> None:
        super().__init__()
        if is_first:
            self.tokens, self.positions = whole.tokens, whole.positions
        else:
            self.norm, self.head = whole.norm, whole.head
        half = LAYERS // 2
        own = [str(index) for index in (range(half) if is_first else range(half, LAYERS))]
        self.layers = nn.ModuleDict({name: whole.layers[name] for name in own})
        self.is_first = is_first

    def forward(self, x, attention_mask):
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        allowed = allowed_pairs(attention_mask)
        for layer in self.layers.values():
            x = layer(x, allowed)
        return x if self.is_first else self.head(self.norm(x))


def allowed_pairs(attention_mask, first_query=0, queries=None):
    """Which query may look at which key: not later, not padding. Queries may be a part of the sequence."""
    length = attention_mask.shape[1]
    rows = first_query + torch.arange(queries or length)
    return (rows[:, None] >= torch.arange(length)) & attention_mask.bool()[:, None, None, :]


def summed_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def build(written_out: bool = False) -> Transformer:
    torch.manual_seed(0)
    return Transformer(written_out)


def global_batch(step: int) -> dict[str, torch.Tensor]:
    """What all ranks together train on in one step: other sizes, lengths and padding in every step."""
    chance = random.Random(step)
    lengths = [chance.randint(3, 18 + 3 * (step % 4)) for _ in range(20 + step % 4)]
    longest = max(lengths) + step % 2
    tokens = torch.randint(0, VOCABULARY, (len(lengths), longest + 1), generator=torch.Generator().manual_seed(step))
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    labels = tokens[:, 1:].masked_fill(mask == 0, IGNORED)
    return {"input_ids": tokens[:, :-1].clone(), "attention_mask": mask, "labels": labels}


def micro_batches(batch, step: int, group: int, groups: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """The parts of one data-parallel group: neither groups nor parts have equally many samples."""
    samples = len(batch["input_ids"])
    cuts = sorted(random.Random(100 + step).sample(range(1, samples), groups * accumulation - 1))
    parts = list(pairwise([0, *cuts, samples]))[group * accumulation : (group + 1) * accumulation]
    return [{name: tensor[first:last] for name, tensor in batch.items()} for first, last in parts]


@cache
def true_flops(steps: int) -> int:
    """Each document alone, run eagerly with attention written out, counted by torch."""
    return sum(_flops_of_row(int(n)) for step in range(steps) for n in global_batch(step)["attention_mask"].sum(1))


def padded_flops(steps: int, multiple: int = 1) -> int:
    """The same with padding; lengths are rounded up to a multiple."""
    shapes = [global_batch(step)["input_ids"].shape for step in range(steps)]
    return sum(rows * _flops_of_row(-(-length // multiple) * multiple) for rows, length in shapes)


@cache
def _flops_of_row(length: int) -> int:
    model, ids = build(written_out=True), torch.zeros(1, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, torch.ones_like(ids), ids)["loss"].backward()
    return int(counter.get_total_flops())
