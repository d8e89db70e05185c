"""What exporting and comparing a large sweep takes: seconds and memory of each command.

python benchmarks/sweeps/report_tables.py [--trials 10000] [--logged 50] [--folder FOLDER]

The trials are made up (`made_up_sweep.py`). `--logged` trials go to W&B offline, and to MLflow where
MLFLOW_TRACKING_URI names a server.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from testbeds.made_up_sweep import make_result, many_specs, write_sweep


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=10_000)
    arguments.add_argument("--logged", type=int, default=50)
    arguments.add_argument("--folder", type=Path, default=None)
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(asked.folder or Path(temporary), asked.trials, asked.logged)


def measure(folder: Path, trials: int, logged: int) -> None:
    results = [make_result(spec) for spec in many_specs(trials)]
    before = str(write_sweep(folder / "before", results))
    after = str(write_sweep(folder / "after", [replace(result, environment={"torch": "2.14.0"}) for result in results]))
    few = str(write_sweep(folder / "few", results[:logged]))
    print(f"| {trials:,} trials | seconds | of them computing | peak memory |\n| --- | --: | --: | --: |")
    run("--csv", "report", before, "--csv", str(folder / "a.csv"))
    run("--parquet", "report", before, "--parquet", str(folder / "a.parquet"))
    run("compare", "compare", before, after)
    run("compare --json", "compare", before, after, "--json")
    run("compare --md", "compare", before, after, "--md", str(folder / "a.md"))
    run(f"--wandb, offline, {logged} trials", "report", few, "--wandb", "sweep-tables", WANDB_MODE="offline")
    if "MLFLOW_TRACKING_URI" in os.environ:
        name = f"sweep-tables-{time.time():.0f}"
        run(f"--mlflow, {logged} trials", "report", few, "--mlflow", name)
        run(f"--mlflow, the same {logged} again", "report", few, "--mlflow", name)


def run(name: str, *words: str, **environment: str) -> None:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "flopwatch", *words], stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    seconds, computing = time.monotonic() - began, used.ru_utime + used.ru_stime
    print(f"| {name} | {seconds:.1f} | {computing:.1f} | {used.ru_maxrss / 1024:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
