"""Call `log_step` millions of times: memory, log size and time per call must not grow with the length of the run.

python benchmarks/reliability/long_run.py --calls 2000000
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.progress import track

from flopwatch import TrainingMonitor

BLOCKS = 20


@dataclass(frozen=True)
class Block:
    """After so many calls."""

    calls: int
    resident_bytes: int
    log_bytes: int
    cpu_seconds: float


def run_long(folder: Path, calls: int) -> list[Block]:
    """One state before the first block (warm) and one after each."""
    torch.set_num_threads(1)
    monitor = TrainingMonitor(folder, flops_fn=lambda batch: 1000, peak_flops_per_s=1e12)
    process = psutil.Process()
    mask = torch.ones(4, 128, dtype=torch.long)
    loss = torch.tensor(2.0)
    blocks = []
    step = 0
    # Plans, percentiles and queues fill up in the first thousands of steps; growth is counted from there.
    for size in track([calls // BLOCKS] * (BLOCKS + 1), "calls", disable=not sys.stdout.isatty()):
        began = time.thread_time()
        for _ in range(size):
            monitor.log_step(step, 0, loss, 1.0, 1e-4, mask)
            step += 1
        seconds = time.thread_time() - began
        monitor.state_dict()  # has the log written up to here
        blocks.append(Block(step, process.memory_info().rss, monitor.log_path.stat().st_size, seconds))
    monitor.close()
    if monitor.summary is None or monitor.summary.dropped_rows:
        raise RuntimeError(f"rows were dropped: {monitor.summary}")
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=2_000_000)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        blocks = run_long(Path(folder), calls)
    first, last = blocks[0], blocks[-1]
    per_call = [1e6 * block.cpu_seconds / (calls // BLOCKS) for block in blocks]
    print(f"{last.calls - first.calls:,} calls after the first {first.calls:,}")
    print(f"resident memory: {(last.resident_bytes - first.resident_bytes) / 2**20:+.2f} MiB")
    print(f"log: {last.log_bytes / last.calls:.1f} bytes per step; first block {first.log_bytes / first.calls:.1f}")
    print(f"CPU per call: first five blocks {min(per_call[:5]):.1f} µs, last five {min(per_call[-5:]):.1f} µs")


if __name__ == "__main__":
    main()
