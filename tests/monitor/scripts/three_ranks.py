"""Three gloo ranks with uneven batches in several runs; each rank prints what its monitor has to say.

Run by tests/monitor/ranks/test_three_ranks.py under torchrun.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flopwatch
from flopwatch.monitor import run as monitor_run

STEPS = 23
WIDTH = 16
SLOW_RANK, SLOW_SECONDS = 1, 0.05


def samples(rank: int, step: int) -> int:
    return 1 + rank + step % 4


def train(monitor: flopwatch.TrainingMonitor, model: torch.nn.Module, steps: range, slow_seconds: float = 0.0) -> None:
    for number in steps:
        batch = torch.randn(samples(dist.get_rank(), number), WIDTH)
        with monitor.step(batch):  # every rank's monitor counts its steps itself, also after a resume
            time.sleep(
                slow_seconds * (dist.get_rank() == SLOW_RANK)
            )  # the other ranks wait for it in the backward pass
            model(batch).sum().backward()


def logged_by_the_last_rank(folder: Path, model: torch.nn.Module) -> Any:
    monitor = flopwatch.TrainingMonitor(folder / "last", model=model, log_every=5, logging_rank=-1)
    train(monitor, model, range(STEPS), SLOW_SECONDS)
    monitor.close()
    return None if monitor.summary is None else dict(monitor.summary.values)


def with_a_row_for_every_step(folder: Path, model: torch.nn.Module) -> Any:
    """And a mask of floats, as a hand-written collator makes it."""
    monitor = flopwatch.TrainingMonitor(folder / "every", flops_fn=lambda batch: 1, log_every=1)
    for number in range(STEPS):
        batch = torch.randn(samples(dist.get_rank(), number), WIDTH)
        mask = torch.zeros(len(batch), 10)
        mask[:, :7] = 1
        model(batch).sum().backward()
        monitor.log_step(512 * (number + 1), attention_mask=mask)
    monitor.close()
    return None if monitor.summary is None else dict(monitor.summary.values)


def resumed_from_a_state(folder: Path, model: torch.nn.Module, name: str, *, on_all_ranks: bool) -> Any:
    """A checkpoint after step 12, in the middle of a window; the steps after it are run again."""
    first = flopwatch.TrainingMonitor(folder / name, model=model, log_every=10)
    train(first, model, range(13))
    state = first.state_dict() if on_all_ranks or dist.get_rank() == 0 else {}
    train(first, model, range(13, 17))
    first.close()
    box = [state]
    dist.broadcast_object_list(box)  # as all ranks read the same checkpoint
    second = flopwatch.TrainingMonitor(folder / name, model=model, log_every=10)
    second.load_state_dict(box[0])
    train(second, model, range(13, STEPS))
    second.close()
    if second.summary is None or first.summary is None:
        return None
    return {"values": dict(second.summary.values), "notices": [dict(m.summary.notices) for m in (first, second)]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # On a busy machine the ranks of so short a run may meet late.
    monitor_run.CLOSE_RANKS_SECONDS = monitor_run.CHECKPOINT_SECONDS = 60.0
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    result = {
        "rank": dist.get_rank(),
        "last": logged_by_the_last_rank(folder, model),
        "every": with_a_row_for_every_step(folder, model),
        "all": resumed_from_a_state(folder, model, "all", on_all_ranks=True),
    }
    monitor_run.CHECKPOINT_SECONDS = 2.0  # the other ranks do not take part in the next checkpoint
    result |= {
        "one": resumed_from_a_state(folder, model, "one", on_all_ranks=False),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*.jsonl")),
    }
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(Path(sys.argv[1]))
