"""Names and places of a sweep's files, and how they are written. Standard library only: supervisors start with it.

DIR/
  sweep.json            every trial of the sweep, in the order of the matrix
  results.jsonl         one result per line, appended by the runner as trials end
  runners/              one numbered file per runner; the highest number holds the folder
  runner.json           process and progress of the latest runner
  preflight.json        which trainer can train which model, and how
  report.html           written by `flopwatch report`
  trials/NAME/          spec.json, started.json, supervisor.json, heartbeat.json, steps.jsonl, measured.json,
                        exception.json, stacks.txt, guard.json, result.json; metrics.json of a command
  logs/NAME.log         everything the trial printed
  runs/NAME/            TensorBoard scalars and the Kineto trace
  earlier/NAME.1/       an earlier attempt: its trials/NAME, its log as log.txt, its run
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SWEEP = "sweep.json"
RESULTS = "results.jsonl"
PREFLIGHT = "preflight.json"
RUNNERS = "runners"
RUNNER = "runner.json"
RUNNER_LOG = "runner.log"
LOCK = "lock"
"""Sweeps of flopwatch 0.1 held this lock instead of a number in `runners`; it still marks a folder as a sweep's."""

TRIALS, LOGS, RUNS, EARLIER = "trials", "logs", "runs", "earlier"

SPEC = "spec.json"
STARTED = "started.json"
"""The claim of the supervisor that runs the trial."""
SUPERVISOR_HEARTBEAT = "supervisor.json"
"""The supervisor's heartbeat; `heartbeat.json` is the worker's."""
HEARTBEAT = "heartbeat.json"
STEPS = "steps.jsonl"
MEASURED = "measured.json"
EXCEPTION = "exception.json"
METRICS = "metrics.json"
"""Written by a command, with whatever numbers it wants to report."""
STACKS = "stacks.txt"
GUARD = "guard.json"
"""Why the guard killed a supervisor that had stopped responding."""
RESULT = "result.json"

KEPT_LOG, KEPT_RUN = "log.txt", "run"
"""A trial's log and run once they lie in `earlier/NAME.1/`."""


def trial_folder(sweep: Path, name: str) -> Path:
    return sweep / TRIALS / name


def log_file(sweep: Path, name: str) -> Path:
    return sweep / LOGS / f"{name}.log"


def run_folder(sweep: Path, name: str) -> Path:
    return sweep / RUNS / name


def of_rank(file: str, rank: int) -> str:
    """The name of a file that every rank of a trial writes for itself; rank 0 writes the trial's own.

    >>> of_rank("measured.json", 0), of_rank("measured.json", 3)
    ('measured.json', 'measured-3.json')
    """
    stem, _, ending = file.partition(".")
    return f"{stem}-{rank}.{ending}" if rank else file


def exception_file(rank: int) -> str:
    """What a rank writes when it raises. The supervisor copies the first failure's to `exception.json`.

    Rank 0 has a number too: `exception.json` must hold the rank that failed first, which may be another one.
    """
    return f"exception-{rank}.json"


def write_json(file: Path, content: Any) -> None:
    """Write to a temporary file beside it and rename, so that a reader finds the whole file or none.

    Without fsync: after a power cut a trial may have to run again, and 10,000 forced writes cost minutes.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
    os.replace(beside, file)


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """Append one line in one write. When the disk fills in the middle, the half line is removed again."""
    line = (json.dumps(content) + "\n").encode()
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        if os.write(handle, line) < len(line):
            os.ftruncate(handle, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(handle)
