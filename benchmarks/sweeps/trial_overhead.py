"""What a sweep costs over starting its workers by hand: both, turn by turn, as one ratio with its spread.

    python benchmarks/sweeps/trial_overhead.py --engines local ray slurm

The other side is a shell loop (local), bare Ray tasks (ray) or a bare sbatch array (slurm), each starting the same
workers on the same trials.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.folder import Trial, held_folder, prepare
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.spec.names import trial_names
from reliability.never_twice import cluster

_WORKER = [sys.executable, "-m", "flopwatch.sweep.worker.main"]


def settings(trials: int, model: str, seq_len: int) -> list[str]:
    """Twenty trials that differ by their seed only."""
    seeds = ",".join(map(str, range(trials)))
    return [
        "--trainer=standard",
        f"--model={model}",
        "--batch-size=4",
        f"--seq-len={seq_len}",
        f"seed={seeds}",
        "device=cpu",
    ]


def prepared(folder: Path, words: list[str]) -> list[Path]:
    """The same trials as folders a worker can be started on."""
    from flopwatch.sweep.spec.parsing import parse_overrides

    specs = expand(read_matrix(None, parse_overrides(words)))
    with held_folder(folder):
        trials = [Trial(folder, name, name, spec) for name, spec in zip(trial_names(specs), specs, strict=True)]
        for trial in trials:
            prepare(trial)
    return [folder / "trials" / trial.name for trial in trials]


def swept(folder: Path, words: list[str], engine: list[str]) -> float:
    command = [sys.executable, "-m", "flopwatch", "sweep", "--output", str(folder), *words, *engine]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    assert all(result.outcome == "ok" for result in read_results(folder).values())
    return seconds


def by_shell_loop(folder: Path, words: list[str], flags: list[str]) -> float:
    trials = prepared(folder, words)
    script = "".join(
        f"'{sys.executable}' -m flopwatch.sweep.worker.main '{trial}' > '{trial}/log' 2>&1\n" for trial in trials
    )
    return _timed(["/bin/sh", "-ec", script], trials)


def by_ray_tasks(folder: Path, words: list[str], flags: list[str]) -> float:
    """A program of its own, as the sweep is, on the same cluster."""
    trials = prepared(folder, words)
    program = (
        "import json, os, ray, subprocess, sys\n"
        "ray.init(address=sys.argv[2])\n"
        "@ray.remote(num_cpus=1, max_calls=1, max_retries=0)\n"
        "def run(trial):\n"
        "    return subprocess.run([sys.executable, '-m', 'flopwatch.sweep.worker.main', trial],\n"
        "                          stdout=open(trial + '/log', 'w'), stderr=subprocess.STDOUT).returncode\n"
        "assert not any(ray.get([run.remote(trial) for trial in json.loads(sys.argv[1])]))\n"
    )
    address = flags[-1].partition("=")[2]
    return _timed([sys.executable, "-c", program, json.dumps([str(trial) for trial in trials]), address], trials)


def by_sbatch_array(folder: Path, words: list[str], flags: list[str]) -> float:
    trials = prepared(folder, words)
    (folder / "list").write_text("".join(f"{trial}\n" for trial in trials))
    line = f'trial=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {folder}/list)'
    script = f"#!/bin/sh\n{line}\nexec {sys.executable} -m flopwatch.sweep.worker.main $trial > $trial/log 2>&1\n"
    (folder / "job.sh").write_text(script)
    array = f"--array=0-{len(trials) - 1}"
    return _timed(
        ["sbatch", "--wait", "--cpus-per-task=1", "--output=/dev/null", array, str(folder / "job.sh")], trials
    )


def _timed(command: list[str], trials: list[Path]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    seconds = time.perf_counter() - began
    assert all(json.loads((trial / "measured.json").read_text())["done"] for trial in trials)
    return seconds


BARE: dict[str, Callable[[Path, list[str], list[str]], float]] = {
    "local": by_shell_loop,
    "ray": by_ray_tasks,
    "slurm": by_sbatch_array,
}


def compare(engine: str, flags: list[str], words: list[str], rounds: int) -> list[tuple[float, float]]:
    """Seconds of the sweep and of the bare way, round by round, the order changing."""
    pairs = []
    for number in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="flopwatch-overhead-"))
        sides: list[Callable[[], float]] = [
            lambda folder=folder: swept(folder / "sweep", words, flags),  # type: ignore[misc]
            lambda folder=folder: BARE[engine](folder / "bare", words, flags),  # type: ignore[misc]
        ]
        seconds = {index: sides[index]() for index in ((0, 1) if number % 2 == 0 else (1, 0))}
        pairs.append((seconds[0], seconds[1]))
        print(
            f"round {number}: sweep {seconds[0]:.1f} s, bare {seconds[1]:.1f} s, ratio {seconds[0] / seconds[1]:.3f}",
            flush=True,
        )
        shutil.rmtree(folder)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=sorted(BARE))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="small")
    parser.add_argument("--seq-len", type=int, default=256)
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every process compiles its imports again
    words, told = settings(asked.trials, asked.model, asked.seq_len), []
    for engine in asked.engines:
        with cluster(engine) as flags:
            pairs = compare(engine, flags, words, asked.rounds)
        ratios = sorted(sweep / bare for sweep, bare in pairs)
        told.append(f"{engine} {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    print(f"{asked.trials} trials, sweep divided by bare: {', '.join(told)}")


if __name__ == "__main__":
    main()
