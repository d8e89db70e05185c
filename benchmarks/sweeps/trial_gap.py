"""The time from the end of one local trial to the start of the next one: 100 trials each of three shell commands.

    python benchmarks/sweeps/trial_gap.py

Prints the median and the 90th percentile of the gaps, in milliseconds. A trial begins when its supervisor starts the
worker, and ends when the worker has ended. Python may write bytecode, as it does when a package is installed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from flopwatch.records.sweep_results import read_results
from flopwatch.stats import median, percentile


def gaps_ms(command: str, trials: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = ",".join(map(str, range(1, trials + 1)))
        words = ["--command", command, f"--batch-size={sizes}", "--seq-len=8", "-o", f"{folder}/s"]
        # Other sweeps on this machine must not be waited for.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["FLOPWATCH_SLOT_DIR"] = f"{folder}/slots"
        command_line = [sys.executable, "-m", "flopwatch", "sweep", *words]
        subprocess.run(command_line, check=True, stdout=subprocess.DEVNULL, env=environment)
        results = read_results(Path(folder, "s")).values()
    assert all(result.outcome == "ok" for result in results)
    spans = sorted((result.unix_time or 0.0, result.seconds or 0.0) for result in results)
    return [1000 * (later[0] - sum(earlier)) for earlier, later in pairwise(spans)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    for command in ("true", "sleep 0.5", "sleep 1"):
        gaps = sorted(gaps_ms(command, parser.parse_args().trials))
        print(f"{command:10} median {median(gaps):6.0f} ms, 90 % below {percentile(gaps, 0.9):6.0f} ms", flush=True)
