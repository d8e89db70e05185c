"""A plain training script that knows nothing of flopwatch: a small GPT with gradient accumulation and evaluation.

flopwatch run examples/plain_train.py
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY, LENGTH, WIDTH, STEPS, ACCUMULATE = 256, 128, 128, 100, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, targets):
        logits = self.head(self.blocks(self.words(ids) + self.places.weight))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    """Rows that count up from a random start, so that there is something to learn."""
    rows = (torch.randint(0, VOCABULARY, (8, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
    return rows[:, :-1], rows[:, 1:]


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    for _ in range(ACCUMULATE):
        _, loss = model(*get_batch())
        (loss / ACCUMULATE).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        with torch.no_grad():
            print(f"step {step + 1}: loss {model(*get_batch())[1]:.4f}")
