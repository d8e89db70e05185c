"""120 steps of DDP or more, in which some ranks also ask a teacher; each rank prints the rows that it logged.

The training goes on until five rows are exact, because the name server decides how soon the ranks meet.

Run by tests/monitor/ranks/test_counted_steps.py under torchrun. The second argument names the ranks that ask the
teacher, the third those that run one more product from `CHANGE` on, of which no module and no gradient tells.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import flopwatch

STEPS, WINDOW, WIDTH, SAMPLES = 120, 10, 64, 8
PATIENCE_S, CHANGE = 90, 86


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def logged_rows(folder: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (Path(folder) / "training_log.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == "row"]


def goes_on(folder: str, deadline: float) -> bool:
    """What rank 0 sees in its log, on every rank."""
    decided = [False]
    if dist.get_rank() == 0:
        exact = [row for row in logged_rows(folder) if row["exact"]]
        decided = [len(exact) < 5 and time.monotonic() < deadline]
    dist.broadcast_object_list(decided)
    return decided[0]


def main(folder: str, asking: set[int], changing: set[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, teacher = nn.parallel.DistributedDataParallel(two_layers()), two_layers()
    weight = torch.randn(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    with flopwatch.TrainingMonitor(
        folder, model=model, log_every=WINDOW, peak_flops_per_s=1e12, strict=True
    ) as monitor:
        step, deadline = 0, time.monotonic() + PATIENCE_S
        while step < STEPS or step % WINDOW or goes_on(folder, deadline):
            step += 1
            batch = torch.randn(SAMPLES, WIDTH)
            with monitor.step(batch):
                target = batch
                if dist.get_rank() in asking:
                    with torch.no_grad():
                        target = teacher(batch)
                if dist.get_rank() in changing and step > CHANGE:
                    with torch.no_grad():
                        batch @ weight
                (model(batch) - target).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    rows = logged_rows(folder) if dist.get_rank() == 0 else []
    sys.stdout.write("RESULT " + json.dumps({"rank": dist.get_rank(), "rows": rows}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(sys.argv[1], *({int(rank) for rank in ranks.split(",") if rank} for ranks in sys.argv[2:]))
