"""The long runs behind docs/sweep.md: killed runners and overhead, under every engine. About an hour on two cores.

    python benchmarks/sweeps/campaign.py --engines local ray slurm

Slurm is started for it and taken down again; `make servers` installs it.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def slurm() -> Iterator[None]:
    """A real Slurm in this process's environment."""
    from testbeds.real_slurm import real_slurm

    folder = Path(tempfile.mkdtemp(prefix="flopwatch-slurm-"))
    try:
        with real_slurm(folder) as environment:
            os.environ.update(environment)
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    print("$", " ".join(["python", f"benchmarks/{script}", *arguments]), flush=True)
    subprocess.run(command, check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["local", "ray", "slurm"])
    parser.add_argument("--parts", nargs="+", default=["kills", "overhead"])
    parser.add_argument("--kills", default="20")
    parser.add_argument("--rounds", default="3")
    asked = parser.parse_args()
    with slurm() if "slurm" in asked.engines else contextlib.nullcontext():
        for part in asked.parts:
            for engine in asked.engines:
                if part == "kills":
                    # Starting Ray takes longer than any trial, so its runners live longer before they are killed.
                    longest = "40" if engine == "ray" else "4"
                    # Slurm's jobs go on without their runner, so there must be more of them to be killed that often.
                    trials = "200" if engine == "slurm" else "60"
                    command = ["--engine", engine, "--kills", asked.kills, "--longest", longest, "--trials", trials]
                    run("reliability/sweep_kills.py", *command)
                else:
                    run("sweeps/trial_overhead.py", "--engine", engine, "--model", "tiny", "--rounds", asked.rounds)


if __name__ == "__main__":
    main()
