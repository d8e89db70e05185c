"""An evaluation after every tenth step, with the model in evaluation mode and without gradients."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = torch.randint(0, 50, (16, 11))


def loss_of(ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def evaluate():
    model.eval()
    with torch.no_grad():
        value = loss_of(held_out).item()
    model.train()
    return value


for step in range(50):
    ids = torch.randint(0, 50, (8, 11))
    loss = loss_of(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step}: held-out loss {evaluate()!r}")
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
