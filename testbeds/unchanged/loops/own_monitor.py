"""A script that uses TrainingMonitor itself; the first argument is the folder of its run."""

import hashlib
import sys

import torch
from torch import nn

import flopwatch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with flopwatch.TrainingMonitor(sys.argv[1], model=model) as monitor:
    for _ in range(50):
        features, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
        with monitor.step(features):
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"measured {monitor.summary.values['total/model_flops']} FLOPs in {monitor.summary.values['total/steps']} steps")
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(f"loss {loss.item()!r}, parameters {digest}")
