"""How much processor time does the monitor take of an ordinary step, on the step's path and with the work of windows?

    python benchmarks/overhead/own_time.py [--other DIR_OF_ANOTHER_CHECKOUT] [--rounds 5]

A process runs a tiny loop without a monitor, with windows that never end (the step's path), or with a window every 50
steps (all of it). All hooks are included. The kinds of processes alternate; the figure of each is the first quartile of
blocks of 25 steps, so that steps that are counted or disturbed do not decide it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
WARM_UP, BLOCKS, STEPS = 1500, 120, 25
NEVER, OFTEN = 100_000, 50


def microseconds(log_every: int) -> float:
    """Processor time of a step; with `log_every` 0, without a monitor."""
    import torch

    import flopwatch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(2, 4)

    def bare() -> torch.Tensor:
        loss: torch.Tensor = model(batch).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Callable[[], object] = bare
    if log_every:
        options = {"log_every": log_every, "log_seconds": 1e9}
        monitor = flopwatch.TrainingMonitor(tempfile.mkdtemp(), model=model, quiet=True, config=options)

        def step() -> None:
            with monitor.step(batch) as opened:
                opened.log(loss=bare())

    def block(steps: int) -> float:
        began = time.thread_time()
        for _ in range(steps):
            step()
        return 1e6 * (time.thread_time() - began) / steps

    block(WARM_UP)
    return statistics.quantiles([block(STEPS) for _ in range(BLOCKS)], n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", type=int)
    options = parser.parse_args()
    if options.measure is not None:
        print(microseconds(options.measure))
        return
    checkouts = {"this": HERE, **({"other": options.other.resolve()} if options.other else {})}
    kinds = [("bare", HERE, 0), *((name, at, every) for name, at in checkouts.items() for every in (NEVER, OFTEN))]
    found: dict[tuple[str, int], list[float]] = {(name, every): [] for name, _, every in kinds}
    for _ in range(options.rounds):
        for name, folder, every in kinds:
            environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
            command = [sys.executable, __file__, "--measure", str(every)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            found[name, every].append(float(done.stdout.split()[-1]))
    bare = statistics.median(found.pop(("bare", 0)))
    print(f"a step without a monitor: {bare:.0f} µs")
    for (name, every), values in found.items():
        own = sorted(value - bare for value in values)
        part = "step's path" if every == NEVER else "all of it"
        print(f"{name}, {part}: {statistics.median(own):.0f} µs, from {own[0]:.0f} to {own[-1]:.0f}")


if __name__ == "__main__":
    main()
