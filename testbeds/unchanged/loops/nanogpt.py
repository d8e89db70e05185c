"""As nanoGPT trains: a compiled model that returns its loss, accumulation, autocast, and an evaluation now and then."""

import hashlib

import torch
from torch import nn

ACCUMULATION = 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(50, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch():
    ids = torch.randint(0, 50, (4, 9))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


torch.manual_seed(0)
raw_model = GPT()
model = torch.compile(raw_model, backend="aot_eager")
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3)
ids, targets = get_batch()
for step in range(40):
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            losses = [model(*get_batch()).item() for _ in range(3)]
        model.train()
    for _ in range(ACCUMULATION):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, targets) / ACCUMULATION
        ids, targets = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in raw_model.parameters())).hexdigest()
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
print(f"loss {loss.item()!r}, evaluations {losses!r}, {graphs} graphs, parameters {digest}")
