"""How much slower are 6,000 tiny steps of about 2 ms with a monitor?

    python benchmarks/overhead/tiny_steps.py [--other DIR_OF_ANOTHER_CHECKOUT] [--rounds 3]

Blocks of 100 steps without and with a monitor alternate in one process; each checkout has processes of its own, which
alternate too. Steps that are counted are in it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
BLOCKS, STEPS = 60, 100


def ratio() -> tuple[float, float]:
    """Time with the monitor over time without it, and milliseconds of a step without it."""
    import torch

    import flopwatch

    torch.set_num_threads(1)
    batch = torch.randn(64, 128)

    def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3)))
        return model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    bare, watched = trained(), trained()
    seconds = [0.0, 0.0]
    with flopwatch.TrainingMonitor(tempfile.mkdtemp(), model=watched[0], peak_flops_per_s=1e12) as monitor:
        for _ in range(BLOCKS):
            began = time.perf_counter()
            for _ in range(STEPS):
                step(*bare)
            between = time.perf_counter()
            for _ in range(STEPS):
                with monitor.step(batch) as opened:
                    opened.log(loss=step(*watched))
            seconds[0] += between - began
            seconds[1] += time.perf_counter() - between
    return seconds[1] / seconds[0], 1e3 * seconds[0] / (BLOCKS * STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="run the loop in this process")
    options = parser.parse_args()
    if options.measure:
        print(*ratio())
        return
    checkouts = {"this": HERE, **({"other": options.other.resolve()} if options.other else {})}
    found: dict[str, list[float]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, folder in checkouts.items():
            environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
            command = [sys.executable, __file__, "--measure"]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
            value, milliseconds = map(float, done.stdout.split()[-2:])
            found[name].append(value)
            print(f"{name}: {value:.3f} times as long as {milliseconds:.2f} ms without", flush=True)
    for name, values in found.items():
        print(f"{name}: median {statistics.median(values):.3f}, from {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
