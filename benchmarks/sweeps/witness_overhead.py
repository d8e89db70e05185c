"""What the monitor itself takes of an ordinary step, hook and witness included, against another checkout.

python benchmarks/sweeps/witness_overhead.py --other DIR_OF_ANOTHER_CHECKOUT [--steps 300] [--rounds 3]

Each round runs both, one after the other, in processes of their own. A step has other work between, so that caches are
cold, as they are in a training. The first 60 steps, in which models are counted, are left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
_COUNTED_STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="run the loop in this process")
    options = parser.parse_args()
    if options.measure:
        print(own_microseconds(options.steps))
        return
    checkouts = {"this": HERE, **({"other": options.other.resolve()} if options.other else {})}
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, folder in checkouts.items():
            found[name].append(_in_a_process(folder, options.steps))
    for name, medians in found.items():
        print(f"{name}: median own time per ordinary step {statistics.median(medians):.0f} µs, rounds {medians}")


def _in_a_process(folder: Path, steps: int) -> float:
    command = [sys.executable, __file__, "--measure", "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return float(result.stdout.split()[-1])


def own_microseconds(steps: int) -> float:
    """Median over ordinary steps of the time in `step()`, `log` and the hook."""
    import torch

    import flopwatch
    from flopwatch.models.load import Decoder
    from flopwatch.models.presets import PRESETS

    hook_seconds = _timed_hook()
    model = Decoder(PRESETS["tiny"])
    ids = torch.randint(0, 1000, (4, 64))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    monitor = flopwatch.TrainingMonitor(tempfile.mkdtemp(), model=model, peak_flops_per_s=1e12)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    other_work, taken = torch.randn(600, 600), []
    for _ in range(steps):
        for _ in range(3):
            torch.mm(other_work, other_work)
        hook_seconds[0] = 0.0
        began = time.perf_counter()
        context = monitor.step(batch)
        step = context.__enter__()
        opened = time.perf_counter()
        loss = model(batch["input_ids"], batch["labels"])["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        step.log(loss=loss, lr=1e-3)
        context.__exit__(None, None, None)
        taken.append(opened - began + time.perf_counter() - trained + hook_seconds[0])
    monitor.close()
    return round(1e6 * statistics.median(taken[_COUNTED_STEPS:]), 1)


def _timed_hook() -> list[float]:
    """Seconds in the hook on the model; checkouts from before it have none."""
    seconds = [0.0]
    try:
        from flopwatch.monitor.counting import calls
    except ImportError:
        return seconds
    hook: Any = getattr(calls, "_GlobalHook", None) or getattr(calls, "_Hook", None)
    original = hook.__call__

    def timed(self: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        original(self, *arguments)
        seconds[0] += time.perf_counter() - began

    hook.__call__ = timed
    return seconds


if __name__ == "__main__":
    main()
