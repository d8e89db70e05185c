"""A week of a sweep in minutes: thousands of trials without work, losses, killed runners, viewers that come and go.

python benchmarks/sweeps/week.py --trials 20000

Every runner is the real command, `flopwatch sweep`, in a session of its own; its engine answers at once and loses one
attempt in a hundred. Runners are killed with SIGKILL and the same command goes on; viewers (`flopwatch watch`) come and
leave by Ctrl-C.
"""

import argparse
import itertools
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from flopwatch.sweep.runner.observing import find_runner

_FLOPWATCH = [sys.executable, "-m", "flopwatch"]
_SEQ_LENS = 100


@dataclass(frozen=True)
class Week:
    """What is asked of it."""

    trials: int
    kills: int = 5
    attaches: int = 3
    share_lost: float = 0.01
    seed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Figures:
    """What came of it; memory in MiB."""

    trials: int
    ok: int
    lost: int
    attempts_lost: int
    recorded_twice: int
    kills: int
    attached: int
    runners: int
    first_thousand_ms: float
    last_thousand_ms: float
    most_growth_of_a_runner_mib: float
    first_runner_mib: float
    last_runner_mib: float
    seconds: float

    @property
    def drift(self) -> float:
        return self.last_thousand_ms / self.first_thousand_ms


def live(week: Week, folder: Path) -> Figures:
    """Run it."""
    began, chance = time.monotonic(), random.Random(week.seed)
    kills = sorted(chance.sample(range(week.trials // 20, week.trials * 19 // 20), week.kills))
    attaches = sorted(chance.sample(range(week.trials // 20, week.trials * 19 // 20), week.attaches))
    attached = runners = 0
    killed: list[int] = []
    while True:
        process = start(week, folder)
        runners += 1
        for done in progress(process, folder):
            if attaches and done >= attaches[0]:
                attaches.pop(0)
                attached += attach_and_leave(folder)
            if kills and done >= kills[0]:
                kills.pop(0)
                process.kill()
                process.wait()
                killed.append(process.pid)
                break
        else:
            break
    return summed_up(week, folder, len(killed), attached, runners, time.monotonic() - began)


def start(week: Week, folder: Path) -> subprocess.Popen[bytes]:
    """The command a user would write, in a session of its own."""
    batches = ",".join(str(size) for size in range(1, -(-week.trials // _SEQ_LENS) + 1))
    lengths = ",".join(str(length) for length in range(1, _SEQ_LENS + 1))
    words = ["sweep", "--command", "true", f"--batch-size={batches}", f"--seq-len={lengths}", "-o", str(folder)]
    engine = ["--engine", "testbeds.flaky_engine:FlakyEngine", "--engine-option", f"share_lost={week.share_lost}"]
    engine += ["--engine-option", f"seconds={week.seconds}"]
    limit = ["--limit", str(week.trials)]
    runner = subprocess.Popen([*_FLOPWATCH, *words, *engine, *limit], stdout=subprocess.DEVNULL, start_new_session=True)
    while (found := find_runner(folder)) is None or found[0].pid != runner.pid:
        if runner.poll() is not None:
            raise RuntimeError(f"the runner ended with status {runner.returncode} before it said who it is")
        time.sleep(0.02)
    return runner


def progress(runner: subprocess.Popen[bytes], folder: Path) -> Iterator[int]:
    """How many ends are recorded, again and again while this runner lives."""
    done, offset = 0, 0
    results = folder / "results.jsonl"
    while runner.poll() is None:
        if results.exists():
            with results.open("rb") as stream:
                stream.seek(offset)
                content = stream.read()
            done, offset = done + content.count(b"\n"), offset + len(content)
        yield done
        time.sleep(0.02)


def attach_and_leave(folder: Path) -> bool:
    """A viewer on a terminal of its own, left by Ctrl-C; True when it drew the table and the runner went on."""
    main, other = pty.openpty()
    command = [*_FLOPWATCH, "watch", str(folder)]
    wide = {**os.environ, "COLUMNS": "250"}
    viewer = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=wide)
    os.close(other)
    seen = b""
    while b" of " not in seen and (piece := _read(main)):
        seen += piece
    if find_runner(folder) is not None:  # else it leaves by itself
        viewer.send_signal(signal.SIGINT)
    while piece := _read(main):
        seen += piece
    os.close(main)
    if viewer.wait(60) or b" of " not in seen:
        raise RuntimeError(f"the viewer left with {viewer.returncode}: {seen[-2000:].decode(errors='replace')}")
    return True


def _read(terminal: int) -> bytes:
    """What is written there; empty when its last writer is gone."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def summed_up(week: Week, folder: Path, kills: int, attached: int, runners: int, seconds: float) -> Figures:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
    by_name = {line["name"]: line for line in lines}
    outcomes = Counter(line["outcome"] for line in by_name.values())
    told = [line["evidence"] for line in lines if line["outcome"] == "ok"]
    lives: dict[int, list[float]] = {}
    for facts in told:
        lives.setdefault(facts["runner_pid"], []).append(facts["runner_rss_bytes"] / 2**20)
    # From one runner to the next nothing ends: that is a runner's start, not the time of a trial.
    steady = [
        1e3 * (after["end_monotonic_seconds"] - before["end_monotonic_seconds"])
        for before, after in itertools.pairwise(told)
        if before["runner_pid"] == after["runner_pid"]
    ]
    some = min(1000, len(steady) // 2)
    return Figures(
        trials=week.trials,
        ok=outcomes["ok"],
        lost=outcomes["lost"],
        attempts_lost=sum(len(line["earlier_attempts"]) for line in by_name.values()),
        recorded_twice=len(lines) - len(by_name),
        kills=kills,
        attached=attached,
        runners=runners,
        first_thousand_ms=mean(steady[:some]),
        last_thousand_ms=mean(steady[-some:]),
        most_growth_of_a_runner_mib=max(max(life) - life[0] for life in lives.values()),
        first_runner_mib=next(iter(lives.values()))[0],
        last_runner_mib=list(lives.values())[-1][-1],
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--attaches", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="Use and keep this folder.")
    asked = parser.parse_args()
    folder = asked.keep or Path(tempfile.mkdtemp(prefix="flopwatch-week-"))
    try:
        figures = live(Week(asked.trials, asked.kills, asked.attaches), folder / "sweep")
    finally:
        if asked.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    for name in figures.__dataclass_fields__:
        print(f"{name:>28} {getattr(figures, name):.5g}")
    print(f"{'drift':>28} {figures.drift:.3f}")


if __name__ == "__main__":
    main()
