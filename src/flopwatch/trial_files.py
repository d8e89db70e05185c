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

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.trial_records import FORMAT, TrialResult

SWEEP = "sweep.json"
RESULTS = "results.jsonl"
PREFLIGHT = "preflight.json"


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


def read_json(file: Path) -> Any:
    """The content; None when there is no such file, or when it is no JSON (somebody else's half-written one)."""
    try:
        return json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def append_line(file: Path, content: Mapping[str, Any]) -> None:
    """One line, in one write."""
    line = (json.dumps(content) + "\n").encode()
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines that are whole; a torn one is left out."""
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def read_result(file: Path) -> TrialResult | None:
    """The trial's end; None while there is none."""
    content = read_json(file)
    if content is None:
        return None
    if content.get("format", 0) > FORMAT:
        raise InputError(f"{file} was written by a newer flopwatch (format {content['format']}); update flopwatch")
    return TrialResult.from_json(content)


def read_results(sweep: Path) -> dict[str, TrialResult]:
    """Every finished trial by name, the newest end of each."""
    if not (sweep / SWEEP).exists() and not (sweep / RESULTS).exists():
        raise InputError(
            f"{sweep} is not the folder of a sweep: it has no {SWEEP}; name the folder `flopwatch sweep` wrote"
        )
    found: dict[str, TrialResult] = {}
    for content in read_lines(sweep / RESULTS):
        if content.get("format", 0) > FORMAT:
            raise InputError(f"{sweep / RESULTS} was written by a newer flopwatch; update flopwatch")
        found[content["name"]] = TrialResult.from_json(content)
    return found
