"""The names of the files in a sweep's folder, and functions that write them. Standard library only.

DIR/
  sweep.json            every trial of the sweep, in the order of the matrix
  results.jsonl         one result per line, appended by the runner as trials end
  runners/              one numbered file per runner process; only the one with the highest number may write
  runner.json           process and progress of the latest runner
  preflight.json        which trainer can train which model, and how
  report.html           written by `flopwatch report`
  trials/NAME/          spec.json, started.json, supervisor.json, heartbeat.json, steps.jsonl, measured.json,
                        exception.json, stacks.txt, guard.json, strays.json, result.json; metrics.json of a command
  logs/NAME.log         what the trial printed; of more than 8 MiB the beginning and the end
  runs/NAME/            TensorBoard scalars and the Kineto trace
  earlier/NAME.1/       an earlier attempt: its trials/NAME, its log as log.txt, its runs/NAME as run
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
"""The lock file of flopwatch 0.1, which had no folder `runners`. It still shows that a folder belongs to a sweep."""

TRIALS, LOGS, RUNS, EARLIER = "trials", "logs", "runs", "earlier"

SPEC = "spec.json"
STARTED = "started.json"
"""Written by the supervisor process that runs the trial, so that no other supervisor starts the same trial."""
SUPERVISOR_HEARTBEAT = "supervisor.json"
"""The supervisor's heartbeat; `heartbeat.json` is the worker's."""
HEARTBEAT = "heartbeat.json"
STEPS = "steps.jsonl"
MEASURED = "measured.json"
EXCEPTION = "exception.json"
METRICS = "metrics.json"
"""Written by the command of a `command` trainer, with any numbers that the report should show."""
STACKS = "stacks.txt"
GUARD = "guard.json"
"""Says why the guard, a second process that monitors the supervisor, killed a supervisor that hung."""
STRAYS = "strays.json"
"""Processes of the trial that have cleared their environment, so that only their pids identify them."""
RESULT = "result.json"

KEPT_LOG, KEPT_RUN = "log.txt", "run"
"""Names of a trial's log and run folder inside `earlier/NAME.1/`."""


def trial_folder(sweep: Path, name: str) -> Path:
    return sweep / TRIALS / name


def log_file(sweep: Path, name: str) -> Path:
    return sweep / LOGS / f"{name}.log"


def run_folder(sweep: Path, name: str) -> Path:
    return sweep / RUNS / name


def of_rank(file: str, rank: int) -> str:
    """The name of a file that every rank writes for itself; the name for rank 0 has no number.

    >>> of_rank("measured.json", 0), of_rank("measured.json", 3)
    ('measured.json', 'measured-3.json')
    """
    stem, _, ending = file.partition(".")
    return f"{stem}-{rank}.{ending}" if rank else file


def exception_file(rank: int) -> str:
    """The name of the file that a rank writes when it raises an exception.

    The name has a number for rank 0 too, because `exception.json` is a copy of the file of the rank that failed first.
    """
    return f"exception-{rank}.json"


def write_json(file: Path, content: Any) -> None:
    """Write JSON to a temporary file and rename it, so that a reader never sees half a file.

    There is no fsync, because 10,000 of them take minutes. At worst, a trial must run again after a power failure.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.replace(beside, file)
    except OSError:  # such as a full disk, where the half of a file would take the last space
        beside.unlink(missing_ok=True)
        raise


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """Append a line of JSON in one write. If the disk is full after half the line, the half is removed again."""
    handle = open_for_lines(file)
    try:
        write_line(handle, content)
    except OSError as error:
        error.filename = str(file)
        raise
    finally:
        os.close(handle)


def open_for_lines(file: Path) -> int:
    return os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)


def write_line(handle: int, content: Mapping[str, Any]) -> None:
    """As `append_line`, to a file that `open_for_lines` opened."""
    line = (json.dumps(content) + "\n").encode()
    before = os.fstat(handle).st_size
    if os.write(handle, line) < len(line):
        os.ftruncate(handle, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
