"""120 steps of DDP in which some ranks also ask a teacher; each rank prints the rows that it logged.

Run by tests/monitor/ranks/test_counted_steps.py under torchrun. The argument names the ranks that ask the teacher.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flopwatch

STEPS, WIDTH, SAMPLES = 120, 64, 8


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def main(folder: str, asking: set[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, teacher = nn.parallel.DistributedDataParallel(two_layers()), two_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    with flopwatch.TrainingMonitor(folder, model=model, log_every=10, peak_flops_per_s=1e12, strict=True) as monitor:
        for _ in range(STEPS):
            batch = torch.randn(SAMPLES, WIDTH)
            with monitor.step(batch):
                target = batch
                if dist.get_rank() in asking:
                    with torch.no_grad():
                        target = teacher(batch)
                (model(batch) - target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    log = Path(folder) / "training_log.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if dist.get_rank() == 0 else []
    rows = [record for record in records if record["type"] == "row"]
    sys.stdout.write("RESULT " + json.dumps({"rank": dist.get_rank(), "rows": rows}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(sys.argv[1], {int(rank) for rank in sys.argv[2].split(",") if rank})
