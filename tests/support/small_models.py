"""Models that are counted in milliseconds."""

import torch
from torch import nn


class TinyText(nn.Module):
    """Takes ids and labels, as a language model does; costs 2 x 16 x 16 per token forward, twice that backward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.Linear(16, 16)

    def forward(self, input_ids, attention_mask=None, labels=None):
        return {"loss": self.layer(self.embedding(input_ids)).sum()}


TINY_FLOPS_PER_TOKEN = 3 * 2 * 16 * 16


def train(model, batch):
    """Forward and backward."""
    model(**batch)["loss"].backward()


def text_batch(batch_size, seq_len):
    ids = torch.ones(batch_size, seq_len, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
