"""One model with two optimizers: one for the embedding, one for the rest."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 40))
of_embedding = torch.optim.SGD(model[0].parameters(), lr=0.1)
of_rest = torch.optim.AdamW(model[1:].parameters(), lr=1e-3)
for _ in range(50):
    ids = torch.randint(0, 40, (4, 9))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    for optimizer in (of_embedding, of_rest):
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
