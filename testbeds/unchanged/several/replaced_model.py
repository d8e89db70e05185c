"""After half of the steps, a wider model and a new optimizer take over."""

import hashlib

import torch
from torch import nn

torch.manual_seed(0)


def new_model(width):
    return nn.Sequential(nn.Linear(10, width), nn.ReLU(), nn.Linear(width, 3))


model = new_model(16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(50):
    if step == 25:
        model = new_model(64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    features, labels = torch.randn(8, 10), torch.randint(0, 3, (8,))
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
