"""Two gloo ranks whose monitors do not all have the same log path; each rank prints what its monitors have to say.

Run by tests/monitor/ranks/test_meeting.py under torchrun.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flopwatch

STEPS, SAMPLES, WIDTH = 60, 4, 8


def monitor_in(folder: Path, model: torch.nn.Module) -> flopwatch.TrainingMonitor:
    return flopwatch.TrainingMonitor(folder, model=model, log_every=10, config={"detailed_log_every": 1})


def train(*monitors: flopwatch.TrainingMonitor, model: torch.nn.Module) -> None:
    for _ in range(STEPS):
        batch = torch.randn(SAMPLES, WIDTH)
        with ExitStack() as steps:
            for monitor in monitors:
                steps.enter_context(monitor.step(batch))
            model(batch).sum().backward()
    for monitor in monitors:
        monitor.close()


def said(monitor: flopwatch.TrainingMonitor) -> Any:
    if monitor.summary is None:
        return None
    peaks = [
        record["values"].get("perf/peak_flops_per_second_per_device")
        for line in monitor.log_path.read_text().splitlines()
        if (record := json.loads(line))["type"] == "row"
    ]
    return {
        "values": dict(monitor.summary.values),
        "notices": dict(monitor.summary.notices),
        "notes": monitor.summary.notes,
        "peak": peaks[-1],
    }


def with_a_folder_for_each_rank(folder: Path, model: torch.nn.Module) -> Any:
    monitor = monitor_in(folder / f"rank{dist.get_rank()}", model)
    train(monitor, model=model)
    return said(monitor)


def with_folders_on_disks_of_their_own(folder: Path, model: torch.nn.Module) -> Any:
    monitor = monitor_in(Path(tempfile.mkdtemp(dir=folder)), model)
    train(monitor, model=model)
    return said(monitor)


def with_a_rehearsal_on_the_first_rank(folder: Path, model: torch.nn.Module, name: str) -> Any:
    """A monitor that only one rank has, before the one of the training."""
    bare = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    if dist.get_rank() == 0:
        train(monitor_in(folder / "rehearsal" / name, bare), model=bare)
    dist.barrier()
    monitor = monitor_in(folder / name.format(rank=dist.get_rank()), model)
    train(monitor, model=model)
    return said(monitor)


def with_a_second_monitor_on_the_first_rank(folder: Path, model: torch.nn.Module) -> Any:
    """A monitor that only one rank has, beside the one of the training, and started before it."""
    more = [monitor_in(folder / "second", model)] if dist.get_rank() == 0 else []
    monitor = monitor_in(folder / "beside", model)
    train(*more, monitor, model=model)
    return {"training": said(monitor), "second": said(more[0]) if more else None}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    result = {
        "rank": dist.get_rank(),
        "whole_cpu": flopwatch.peak_flops("cpu", "fp32").flops_per_s,
        "own_folders": with_a_folder_for_each_rank(folder, model),
        "own_disks": with_folders_on_disks_of_their_own(folder, model),
        "rehearsal": with_a_rehearsal_on_the_first_rank(folder, model, "training"),
        "rehearsal_own_folders": with_a_rehearsal_on_the_first_rank(folder, model, "training{rank}"),
        "second": with_a_second_monitor_on_the_first_rank(folder, model),
    }
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(Path(sys.argv[1]))
