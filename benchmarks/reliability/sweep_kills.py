"""Kill the runner of a sweep again and again; what was finished must stand, what ran may repeat, nothing may linger.

python benchmarks/reliability/sweep_kills.py --engine local --kills 20
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flopwatch.records.sweep_results import read_results
from flopwatch.sweep.folder import is_supervised

_TRIAL = "echo {batch_size} $$ >> starts.txt; sleep $(( {batch_size} % 3 )).4; echo {batch_size} >> ends.txt"


@dataclass
class Tally:
    """What the kills did."""

    kills: int = 0
    kills_while_running: int = 0
    trials: int = 0
    repeated: int = 0
    repeated_after_end: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unwatched: list[int] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.repeated_after_end or self.lost or self.unwatched)


def start_runner(folder: Path, trials: int, engine: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "flopwatch", "sweep", "--output", "sweep", "--command", _TRIAL]
    sizes = ",".join(map(str, range(1, trials + 1)))
    return subprocess.Popen(
        [*command, f"--batch-size={sizes}", "--seq-len=1", *engine],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "errors.txt").open("ab"),
        env={**os.environ, "FLOPWATCH_SLOT_DIR": str(folder / "slots")},
    )


def running_trials(sweep: Path) -> dict[str, list[int]]:
    """Processes by trial, those of workers only: supervisors do not carry the mark."""
    found: dict[str, list[int]] = {}
    mark = f"FLOPWATCH_TRIAL_DIR={sweep.resolve()}/trials/".encode()
    for entry in Path("/proc").iterdir():
        try:
            values = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if values else "Z"
        except OSError:
            continue
        for value in values:
            if value.startswith(mark) and state != "Z":
                found.setdefault(value.removeprefix(mark).decode(), []).append(int(entry.name))
    return found


def unwatched(sweep: Path, patience_seconds: float = 15.0) -> list[int]:
    """Processes of trials without a supervisor, after giving supervisors time to clean up."""
    deadline = time.monotonic() + patience_seconds
    while True:
        left = [pid for name, pids in running_trials(sweep).items() if not is_supervised(sweep, name) for pid in pids]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def campaign(folder: Path, engine: list[str], kills: int, trials: int, seed: int, longest: float) -> Tally:
    draw = random.Random(seed)
    tally = Tally(trials=trials)
    sweep = folder / "sweep"
    while tally.kills < kills:
        runner = start_runner(folder, trials, engine)
        try:
            runner.wait(draw.uniform(0.3, longest))
            break  # all done before the last kill
        except subprocess.TimeoutExpired:
            tally.kills_while_running += bool(running_trials(sweep))
            os.kill(runner.pid, signal.SIGKILL)
            runner.wait()
        tally.kills += 1
        tally.unwatched += unwatched(sweep)
    final = start_runner(folder, trials, engine)
    assert final.wait() == 0, (folder / "errors.txt").read_text()[-2000:]
    _judge(folder, sweep, tally)
    return tally


def _judge(folder: Path, sweep: Path, tally: Tally) -> None:
    results = read_results(sweep)
    tally.lost = [f"trial {size}" for size in range(1, tally.trials + 1) if not _is_done(results, size)]
    starts = [int(line.split()[0]) for line in (folder / "starts.txt").read_text().splitlines()]
    ends = [int(line) for line in (folder / "ends.txt").read_text().splitlines()]
    tally.repeated = len(starts) - len(set(starts))
    # One that reached its last line was finished but for the blink of an eye between that and its result.
    tally.repeated_after_end = [f"trial {size}" for size in set(ends) if ends.count(size) > 1]
    tally.unwatched += unwatched(sweep)


def _is_done(results: Mapping[str, object], size: int) -> bool:
    result = results.get(f"Command_bs{size}_seq1")
    return getattr(result, "outcome", None) == "ok"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--engine-option", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--longest", type=float, default=4.0, help="Most seconds before a kill.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    options = [word for option in asked.engine_option for word in ("--engine-option", option)]
    engine = ["--engine", asked.engine, *options, *(["--jobs", str(asked.jobs)] if asked.engine == "local" else [])]
    folder = Path(tempfile.mkdtemp(prefix="flopwatch-kills-"))
    tally = campaign(folder, engine, asked.kills, asked.trials, asked.seed, asked.longest)
    print(tally)
    if not tally.is_clean:
        sys.exit(f"not clean; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
