"""How long the light side takes to answer, against `import click, rich`.

    python benchmarks/startup/import_time.py [repeats]

Runs are interleaved; the figure is the median of the ratios of neighbouring runs, with its quartiles.
"""

import statistics
import subprocess
import sys
import time

BASE = ["-c", "import click, rich"]
COMMANDS = {
    "flopwatch --help": ["-m", "flopwatch", "--help"],
    'flopwatch peak --name "NVIDIA H100 80GB HBM3"': ["-m", "flopwatch", "peak", "--name", "NVIDIA H100 80GB HBM3"],
}


def ratios(repeats: int) -> dict[str, list[float]]:
    """Seconds of each command over the seconds of the imports run right before it."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, arguments in COMMANDS.items():
            base = _seconds(BASE)
            found[name].append(_seconds(arguments) / base)
    return found


def _seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    for name, values in ratios(repeats).items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name}: {median:.2f} x the time of `import click, rich` (quartiles {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
