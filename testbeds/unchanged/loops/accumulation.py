"""Gradients of four micro-batches per optimizer step, from a DataLoader."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
ACCUMULATION = 4
dataset = TensorDataset(torch.randn(800, 20), torch.randint(0, 5, (800,)))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for number, (features, labels) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(features), labels) / ACCUMULATION
    loss.backward()
    if (number + 1) % ACCUMULATION == 0:
        optimizer.step()
        optimizer.zero_grad()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
