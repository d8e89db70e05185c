"""Kill a monitored training at random moments, over and over, until it gets to its end; then read its log.

    python benchmarks/reliability/kills.py --kills 50

What must hold: every line in the log but at most one per kill is whole, no step is missing between the first and the
last one written, and the totals at the end are those of a run that was never killed.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from reliability.killed_run import TOKENS_PER_STEP

SCRIPT = Path(__file__).with_name("killed_run.py")


@dataclass(frozen=True)
class Outcome:
    """What the log says after so many kills."""

    kills: int
    lines: int
    torn_lines: int
    missing_steps: int
    total_steps: int
    total_tokens: int
    expected_steps: int

    @property
    def is_right(self) -> bool:
        whole = self.torn_lines <= self.kills and self.missing_steps == 0
        totals = (self.total_steps, self.total_tokens)
        return whole and totals == (self.expected_steps, self.expected_steps * TOKENS_PER_STEP)


def run_killed(folder: Path, kills: int, seed: int = 0) -> Outcome:
    """Start, kill after a random while, start again; the last start runs to the end."""
    chance = random.Random(seed)
    last_step = 10**9
    log, checkpoint = folder / "training_log.jsonl", folder / "checkpoint.json"
    for _ in track(range(kills), "kills", disable=not sys.stdout.isatty()):
        size = log.stat().st_size if log.exists() else 0
        process = _start(folder, last_step)
        while not checkpoint.exists() or log.stat().st_size == size:  # its start-up is not what is tested
            if process.poll() is not None:
                raise RuntimeError(f"the training ended by itself with {process.returncode}")
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.wait()
    reached = json.loads(checkpoint.read_text())["next_step"]
    expected = reached + 37
    if _start(folder, expected).wait() != 0:
        raise RuntimeError("the last start did not get to its end")
    return _read(log, kills, expected)


def _start(folder: Path, last_step: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(SCRIPT), str(folder), str(last_step)])


def _read(log: Path, kills: int, expected_steps: int) -> Outcome:
    lines = log.read_bytes().splitlines()
    records, torn = [], 0
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            torn += 1 if line else 0
    seen = {step for record in records if record["type"] == "row" for step in record["steps"]["step"]}
    summary = records[-1]["values"]
    return Outcome(
        kills,
        len(lines),
        torn,
        len(set(range(expected_steps)) - seen),
        summary["total/steps"],
        summary["total/tokens"],
        expected_steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_killed(Path(folder), kills)
    print(outcome)
    print("as it must be" if outcome.is_right else "WRONG")
    sys.exit(not outcome.is_right)


if __name__ == "__main__":
    main()
