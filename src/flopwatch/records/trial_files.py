"""Where a sweep's files lie, and how they are written and read. Standard library only.

DIR/
  sweep.json            the trials of the sweep, in the order they were asked for
  results.jsonl         one result per line, appended by the runner as trials end
  runners/              who has run this sweep; the highest number holds it
  preflight.json        which trainer can train which model, and how
  report.html           ...
  trials/NAME/          spec.json, started.json, supervisor.json, heartbeat.json, steps.jsonl, measured.json,
                        exception.json, result.json
  logs/NAME.log         everything the trial printed
  runs/NAME/            TensorBoard scalars and the Kineto trace
  earlier/NAME.1/       a trial that was run again: what lay in trials/NAME, and its log
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwatch.records.reading import read_json, read_lines
from flopwatch.records.sweep_results import PREFLIGHT, RESULTS, SWEEP, read_result, read_results

__all__ = [
    "PREFLIGHT",
    "RESULTS",
    "SWEEP",
    "append_line",
    "log_file",
    "read_json",
    "read_lines",
    "read_result",
    "read_results",
    "run_folder",
    "trial_folder",
    "write_json",
]


def trial_folder(sweep: Path, name: str) -> Path:
    return sweep / "trials" / name


def log_file(sweep: Path, name: str) -> Path:
    return sweep / "logs" / f"{name}.log"


def run_folder(sweep: Path, name: str) -> Path:
    return sweep / "runs" / name


def write_json(file: Path, content: Any) -> None:
    """Whole or not at all, whoever is killed: written beside, then renamed.

    Not forced to disk: after a power cut a trial may have to run again, and 10,000 forced writes cost minutes.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    with open(beside, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
    os.replace(beside, file)


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """One line, in one write. What a full disk takes of it is taken back: half a line would spoil the next."""
    line = (json.dumps(content) + "\n").encode()
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(handle).st_size
        if os.write(handle, line) < len(line):
            os.ftruncate(handle, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(handle)
