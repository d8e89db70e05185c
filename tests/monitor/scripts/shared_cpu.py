"""Two gloo ranks on one CPU; the logging rank prints the peaks that it has logged, and the CPU's own.

Run by tests/monitor/ranks/test_shared_devices.py under torchrun.
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

STEPS = 30
REGISTER_SECONDS = 4.0
"""By then all ranks have registered their device. Windows that end before have the number that the launcher told."""


def logged_peaks(folder: Path) -> dict[str, Any]:
    """Of every row; and what this process's CPU can do."""
    whole = flopwatch.peak_flops("cpu", "fp32")
    assert whole is not None
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
    monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=10, config={"detailed_log_every": 1})
    for number in range(STEPS):
        if number == 1:
            time.sleep(REGISTER_SECONDS)
        batch = torch.randn(4, 8)
        with monitor.step(batch) as step:
            loss = model(batch).sum()
            loss.backward()
            step.log(loss=loss)
    monitor.close()
    dist.barrier()  # the logging rank has written it
    records = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    values = [record["values"] for record in records if record["type"] == "row"]
    sources = [record["peak"]["source"] for record in records if record["type"] == "provenance"]
    peaks = [row["perf/peak_flops_per_second_per_device"] for row in values if row["ranks/reporting"] == 2]
    return {"whole": whole.flops_per_s, "peaks": peaks, "source": sources[-1]}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    monitor_run.CLOSE_RANKS_SECONDS = 60.0  # on a busy machine the ranks of so short a run may meet late
    dist.init_process_group("gloo")
    result = {"as_launched": logged_peaks(folder / "as_launched")}
    dist.barrier()
    del os.environ["LOCAL_WORLD_SIZE"]
    result["nobody_tells"] = logged_peaks(folder / "nobody_tells")
    dist.barrier()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    result["pinned"] = logged_peaks(folder / "pinned")
    sys.stdout.write("RESULT " + json.dumps({"rank": dist.get_rank(), "cores": len(cores), **result}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(Path(sys.argv[1]))
