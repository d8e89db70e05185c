"""What the first steps of a monitored training cost beyond the training itself: CPU milliseconds of counting.

The same model takes the same steps bare and in `with monitor.step(batch)`, each in a process of its own, in turn. Run:
`OMP_NUM_THREADS=1 python benchmarks/startup/first_steps.py [--preset small] [--steps 20] [--repeats 5]`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from flopwatch.models.load import Decoder
from flopwatch.models.presets import PRESETS
from flopwatch.monitor.training_monitor import TrainingMonitor

BATCH_SIZE, SEQ_LEN = 2, 64
FIRST = 3


def run(preset: str, steps: int, *, is_monitored: bool) -> dict[str, float]:
    """CPU milliseconds from the first step's beginning to the end of the third and of the last step."""
    torch.manual_seed(0)
    sizes = PRESETS[preset]
    model = Decoder(sizes).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, sizes.vocab_size, (BATCH_SIZE, SEQ_LEN))
    batch = {"input_ids": ids, "labels": ids.clone()}
    step(model, optimizer, batch)  # torch's own first time
    with tempfile.TemporaryDirectory() as folder:
        monitor: Any = None
        if is_monitored:
            monitor = TrainingMonitor(folder, model=model, sinks=[], log_every=10, peak_flops_per_s=1e12)
        began = time.process_time()
        until: dict[str, float] = {}
        for number in range(1, steps + 1):
            with monitor.step(batch=batch) if monitor else nullcontext():
                step(model, optimizer, batch)
            if number == FIRST:
                until["first"] = 1e3 * (time.process_time() - began)
        until["all"] = 1e3 * (time.process_time() - began)
        if monitor:
            until["counting"] = 1e3 * monitor.count_seconds
            monitor.close()
    return until


def step(model: Decoder, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    model(**batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small", choices=PRESETS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=("bare", "monitored"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.preset, options.steps, is_monitored=options.one == "monitored")))
        return
    found: dict[str, list[dict[str, float]]] = {"bare": [], "monitored": []}
    for _ in range(options.repeats):
        for kind, results in found.items():
            command = [sys.executable, __file__, "--one", kind, "--preset", options.preset, "--steps", options.steps]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print("| until the end of step | bare, CPU ms (median) | monitored (min / median / max) |")
    print("| --- | --- | --- |")
    for name, number in (("first", FIRST), ("all", options.steps)):
        bare = median(one[name] for one in found["bare"])
        told = sorted(one[name] for one in found["monitored"])
        print(f"| {number} | {bare:.0f} | {told[0]:.0f} / {median(told):.0f} / {told[-1]:.0f} |")
    counting = sorted(one["counting"] for one in found["monitored"])
    print(f"counting, by the monitor's own clock (wall): {median(counting):.0f} ms")


if __name__ == "__main__":
    main()
