"""FSDP2: `torchrun --nproc-per-node 2 fsdp2.py`. Each rank holds a half of every parameter."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 50))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
for _ in range(40):
    ids = torch.randint(0, 50, (4, 9))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
shards = [p.to_local().detach().numpy().tobytes() for p in model.parameters()]
digest = hashlib.sha256(b"".join(shards)).hexdigest()
os.write(1, f"rank {rank}: loss {loss.item()!r}, parameters {digest}\n".encode())
dist.destroy_process_group()
