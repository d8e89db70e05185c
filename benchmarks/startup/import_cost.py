"""How much `import flopwatch` adds to `import torch`, and `flopwatch --help` in comparison with it.

    python benchmarks/startup/import_cost.py [repeats]

Processor time of whole processes, without that of an empty Python. The runs are interleaved; the figure is the median
of the ratios of neighbouring runs, with its quartiles.
"""

import resource
import statistics
import subprocess
import sys

NOTHING = ["-c", "pass"]
TORCH = ["-c", "import torch"]
MEASURED = {
    "import flopwatch": ["-c", "import flopwatch"],
    "flopwatch --help": ["-m", "flopwatch", "--help"],
}


def ratios_to_torch(repeats: int) -> dict[str, list[float]]:
    """Processor time of each command as a fraction of that of `import torch`, once per repeat."""
    found: dict[str, list[float]] = {name: [] for name in MEASURED}
    for _ in range(repeats):
        nothing = cpu_seconds(NOTHING)
        torch = cpu_seconds(TORCH) - nothing
        for name, arguments in MEASURED.items():
            found[name].append((cpu_seconds(arguments) - nothing) / torch)
    return found


def cpu_seconds(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for name, values in ratios_to_torch(repeats).items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name}: {median:.1%} of `import torch` (quartiles {low:.1%} to {high:.1%}, {repeats} runs)")


if __name__ == "__main__":
    main()
