"""DDP on gloo: every rank looks for a request for a trace and answers it. Run by tests/monitor/test_traced_ranks.py."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flopwatch
from flopwatch.runs.traces.files import write_request

MOST_STEPS, MORE_STEPS, ASK_AT, LOG_EVERY = 100_000, 20, 22, 5


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = flopwatch.TrainingMonitor(folder, model=model, peak_flops_per_s=1e12, log_every=LOG_EVERY, strict=True)
    last = MOST_STEPS
    for step in range(MOST_STEPS):
        if step > last:
            break
        if step == ASK_AT and rank == 0:
            write_request(Path(folder) / "traces", 2)
        is_traced = torch.tensor(float(bool(list(Path(folder, "traces").glob(f"step*_rank{rank}.*")))))
        dist.all_reduce(is_traced, dist.ReduceOp.MIN)
        if is_traced and last == MOST_STEPS:
            last = step + MORE_STEPS  # in which no second trace may be taken
        x = torch.randn(64, 256)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, batch=x)
    monitor.close()
    sys.stdout.write(f"RESULT {json.dumps({'rank': rank})}\n")
    sys.stdout.flush()
    dist.barrier()
    # Tearing a gloo group down after a backward pass can deadlock in torch 2.13 (docs/ranks.md).
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
