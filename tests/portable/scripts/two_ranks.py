"""DDP on two gloo ranks with batches of their own sizes, without the monitor and then with it.

Started with torchrun by tests/portable/test_two_ranks.py; each rank writes its result into a file.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import flopwatch
from flopwatch.monitor import run as monitor_run

STEPS, WIDTH = 12, 16


def train(folder: Path | None) -> tuple[str, dict[str, float] | None]:
    """A hash of the trained weights, and the sums of the monitor; without a folder there is no monitor."""
    torch.manual_seed(1)
    rank = dist.get_rank()
    layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Dropout(0.3))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = None if folder is None else flopwatch.TrainingMonitor(folder, model=model, log_every=5, strict=True)
    torch.manual_seed(2 + rank)
    for number in range(STEPS):
        batch = torch.randn(2 + rank, WIDTH)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log_step(number, 0, loss, batch=batch)
    if monitor is not None:
        monitor.close()
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in layers.parameters())
    summary = None if monitor is None else monitor.summary
    return hashlib.sha256(weights).hexdigest(), None if summary is None else dict(summary.values)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    monitor_run.CLOSE_RANKS_SECONDS = 60.0  # on a busy machine the ranks of so short a run may meet late
    dist.init_process_group("gloo")
    bare, _ = train(None)
    watched, values = train(folder / "run")
    result = {"bare": bare, "watched": watched, "values": values}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo, with and without flopwatch (docs/ranks.md)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
