"""As torchtitan trains: compiled blocks, FSDP2 around each block and the whole, 2 ranks."""

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


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.layers, self.head = nn.Embedding(50, 16), nn.ModuleList(), nn.Linear(16, 50)
        for _ in range(2):
            self.layers.append(Block())

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


model = Blocks()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.layers:
    layer.compile(backend="aot_eager")
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
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
