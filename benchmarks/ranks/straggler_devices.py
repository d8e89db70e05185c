"""Is the rank whose device is slow named? Two real DDP ranks, and a fake of the events of an accelerator.

    python benchmarks/ranks/straggler_devices.py                   # 40 windows without a delay, 20 with each
    python benchmarks/ranks/straggler_devices.py --windows 5 --quiet-windows 5

The layer of the model sleeps in its forward and its backward pass, and an event is a reading of the host's clock. That
is right here, because a sleep ends before the next one begins. So this shows whether real DDP waits where flopwatch
looks for it, and nothing about the events of a GPU. Rank 1 is delayed by a tenth of the step: before it has its batch
(input), in the forward or the backward pass (compute), or between its batch and the forward pass (host).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import flopwatch
from flopwatch.monitor import run
from flopwatch.monitor.timing.tape import EventTimer

CASES = {"none": None, "input": "input", "forward": "compute", "backward": "compute", "host": "host"}
"""What is delayed, and the cause that must be named."""
SLOW_RANK = 1
FORWARD_SECONDS, BACKWARD_SECONDS = 0.015, 0.03
WINDOW_STEPS = 10
_SETTLING_WINDOWS = 6
"""The medians are over 32 steps at least, and a rank must stand out twice."""


class HostEvent:
    """An event of a device whose work ends before the host goes on."""

    def __init__(self, device: object, *, enable_timing: bool) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "HostEvent") -> float:
        return 1e3 * (end.seconds - self.seconds)


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        time.sleep(forward)
        ctx.backward_seconds = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class Model(torch.nn.Module):
    """Has a buffer, so that DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))
        self.late_forward = self.late_backward = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = FORWARD_SECONDS + self.late_forward, BACKWARD_SECONDS + self.late_backward
        return Sleeping.apply(self.layer(x) * self.table, forward, backward)  # type: ignore[no-any-return, no-untyped-call]


def train(case: str, windows: int, folder: Path, delay_seconds: float) -> None:
    model = Model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    batch, late = torch.randn(4, 8), delay_seconds if dist.get_rank() == SLOW_RANK else 0.0
    model.late_forward, model.late_backward = late * (case == "forward"), late * (case == "backward")
    settings = {"log_every": WINDOW_STEPS, "detailed_log_every": WINDOW_STEPS, "log_seconds": 600.0}
    with flopwatch.TrainingMonitor(folder, config={"flopwatch": settings}, model=parallel, sinks=[]) as monitor:
        for _ in range((windows + _SETTLING_WINDOWS) * WINDOW_STEPS):
            time.sleep(late * (case == "input"))
            with monitor.step(batch):
                time.sleep(late * (case == "host"))
                parallel(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def verdict(case: str, folder: Path) -> dict[str, int]:
    """In how many windows which rank was named, and for which cause."""
    records = map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
    rows = [record["values"] for record in records if record["type"] == "row"][_SETTLING_WINDOWS:]
    named = [values for values in rows if "ranks/straggler" in values]
    right = [values for values in named if values["ranks/straggler"] == SLOW_RANK and case != "none"]
    causes = [max(("input", "compute", "host"), key=lambda c: v[f"ranks/straggler_{c}_percent"]) for v in right]
    return {
        "windows": len(rows),
        "right": len(right),
        "right cause": sum(cause == CASES[case] for cause in causes),
        "wrong": len(named) - len(right),
        "own seconds": sum("ranks/own_seconds_max" in values for values in rows),
    }


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    run.timer_for = lambda device, clock: EventTimer(device, HostEvent)  # type: ignore[attr-defined]
    dist.init_process_group("gloo")
    found = {}
    for case in options.cases:
        folder = Path(options.folder, case)
        delay_seconds = options.delay_share * (FORWARD_SECONDS + BACKWARD_SECONDS)
        train(case, options.quiet_windows if case == "none" else options.windows, folder, delay_seconds)
        dist.barrier()
        if dist.get_rank() == 0:
            found[case] = verdict(case, folder)
    sys.stdout.write(f"RESULT {json.dumps({'rank': dist.get_rank(), 'found': found})}\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--quiet-windows", type=int, default=40)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--delay-share", type=float, default=0.1, help="of the passes")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.folder:
        work(options)
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        command = [*launcher, *sys.argv[1:], "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        out = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    results = [json.loads(line.partition("RESULT ")[2]) for line in out.splitlines() if "RESULT" in line]
    found = next(result["found"] for result in results if result["rank"] == 0)
    print(
        "| delay | windows | named right | with the right cause | another rank named |\n| --- | --- | --- | --- | --- |"
    )
    for case, numbers in found.items():
        values = (numbers[name] for name in ("windows", "right", "right cause", "wrong"))
        print(f"| {case} | {' | '.join(map(str, values))} |")


if __name__ == "__main__":
    main()
