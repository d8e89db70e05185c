"""Is the slow rank named? One of two DDP ranks is delayed by 10 % of the step: in its input, its compute, on its host.

    python benchmarks/ranks/straggler_ranks.py                     # 200 windows without a delay, 40 with each
    python benchmarks/ranks/straggler_ranks.py --windows 10 --quiet-windows 20

Each case is a torchrun of its own. The verdicts are read from the log; the truth is what this script delays.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

CASES = ("none", "input", "compute", "host")
SLOW_RANK = 1
DELAY_SHARE = 0.10
WINDOW_STEPS = 20
ROWS = 512
_SETTLING_WINDOWS = {"none": 7, "input": 7, "compute": 20, "host": 40}
"""Processor time is a median over a minute; hold-ups are looked for about twice a second, and 150 looks remembered."""


def train(case: str, windows: int, folder: str, delay_share: float, rows: int) -> None:
    import torch
    import torch.distributed as dist

    import flopwatch

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(rows, 512)

    def step(monitor: Any, delay_seconds: float) -> None:
        is_slow = rank == SLOW_RANK and delay_seconds > 0
        if is_slow and case == "input":
            time.sleep(delay_seconds)
        with monitor.step(batch):
            if is_slow and case == "host":
                time.sleep(delay_seconds)
            loss = model(batch).square().mean()
            if is_slow and case == "compute":
                _compute_for(delay_seconds, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    settings = {"log_every": WINDOW_STEPS, "detailed_log_every": WINDOW_STEPS, "log_seconds": 600.0}
    with flopwatch.TrainingMonitor(folder, config={"flopwatch": settings}, model=model) as monitor:
        for _ in range(WINDOW_STEPS):
            step(monitor, 0.0)
        began = time.perf_counter()
        for _ in range(WINDOW_STEPS):
            step(monitor, 0.0)
        undelayed = torch.tensor([(time.perf_counter() - began) / WINDOW_STEPS])
        dist.broadcast(undelayed, 0)
        delay = 0.0 if case == "none" else delay_share * undelayed.item()
        for _ in range((windows + _SETTLING_WINDOWS[case]) * WINDOW_STEPS):
            step(monitor, delay)
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


def _compute_for(cpu_seconds: float, batch: Any) -> None:
    ends = time.thread_time() + cpu_seconds
    while time.thread_time() < ends:
        batch[:64] @ batch


def verdicts(folder: Path, case: str) -> list[dict[str, float]]:
    """The values of the windows that count."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if '"type":"row"' in line.replace(" ", "")]
    return [row["values"] for row in rows[2 + _SETTLING_WINDOWS[case] :]]


def cause(values: dict[str, float]) -> str:
    shares = {name: values[f"ranks/straggler_{name}_percent"] for name in ("input", "compute", "host")}
    return max(shares, key=lambda name: shares[name])


def run(
    case: str, windows: int, folder: Path, delay_share: float = DELAY_SHARE, rows: int = ROWS
) -> list[dict[str, float]]:
    """The values of each window in a training of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    settings = ["--windows", str(windows), "--folder", str(folder), "--delay-share", str(delay_share)]
    settings += ["--rows", str(rows)]
    command = [*launcher, __file__, "--worker", case, *settings]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    return verdicts(folder, case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--quiet-windows", type=int, default=200)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--delay-share", type=float, default=DELAY_SHARE, help="of the undelayed step")
    parser.add_argument("--rows", type=int, default=ROWS, help="of the batch")
    parser.add_argument("--worker", choices=CASES)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.windows, options.folder, options.delay_share, options.rows)
    print("| delay | windows | named right | cause right | another rank named | step | excess, median |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in options.cases:
        with tempfile.TemporaryDirectory() as folder:
            windows = options.quiet_windows if case == "none" else options.windows
            found = run(case, windows, Path(folder), options.delay_share, options.rows)
            print(table_row(case, found), flush=True)


def table_row(case: str, rows: list[dict[str, float]]) -> str:
    named = Counter(int(values["ranks/straggler"]) for values in rows if "ranks/straggler" in values)
    right = 0 if case == "none" else named[SLOW_RANK]
    causes = sum(cause(v) == case for v in rows if v.get("ranks/straggler") == SLOW_RANK and case != "none")
    excess = sorted(values.get("ranks/straggler_excess_percent", 0.0) for values in rows)
    step = sorted(values["perf/step_time"] for values in rows)[len(rows) // 2]
    return (
        f"| {case} | {len(rows)} | {right} | {causes} | {named.total() - right} | {1e3 * step:.0f} ms "
        f"| {excess[len(excess) // 2]:.1f} % |"
    )


if __name__ == "__main__":
    main()
