"""Attempts of a trial that were lost: put aside whole and listed in the next one's `spec.json`.

The list lies in the trial's own folder, so that a killed runner forgets nothing and a job that Slurm runs again can
go on with it while no runner is there. Standard library only: supervisors use it.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.trial_files import log_file, read_json, run_folder, trial_folder
from flopwatch.trial_records import TrialResult

Attempt: TypeAlias = Mapping[str, Any]
"""One of `TrialResult.earlier_attempts`."""

_SPEC = "spec.json"


def listed_attempts(sweep: Path, name: str, key: str) -> tuple[Attempt, ...]:
    """What was tried before the attempt whose `spec.json` lies there now, oldest first; nothing of another content."""
    job = read_json(trial_folder(sweep, name) / _SPEC)
    found = job.get("earlier_attempts") if isinstance(job, dict) and job.get("key") == key else None
    return tuple(entry for entry in found if isinstance(entry, dict)) if isinstance(found, list) else ()


def attempt_from(result: TrialResult, folder: str | None) -> Attempt:
    """What is remembered of an attempt; `folder` is where its files were put, None when it left none."""
    return {
        "outcome": result.outcome,
        "reason": result.reason,
        "host": result.evidence.get("host") or result.environment.get("host"),
        "state": result.evidence.get("state") or result.evidence.get("error"),
        "unix_time": result.unix_time,
        "seconds": result.seconds,
        "folder": folder,
    }


def put_aside(sweep: Path, name: str) -> str:
    """Move the trial's folder, log and run to `earlier/NAME.N`; returns that path within the sweep."""
    place = free_name(sweep / "earlier" / name)
    place.parent.mkdir(exist_ok=True)
    trial_folder(sweep, name).rename(place)
    moves = ((log_file(sweep, name), place / "log.txt"), (run_folder(sweep, name), place / "run"))
    for source, target in moves if place.is_dir() else ():
        if os.path.lexists(source) and not os.path.lexists(target):
            shutil.move(source, target)
    return str(place.relative_to(sweep))


def free_name(place: Path) -> Path:
    """The first of PLACE.1, PLACE.2, ... that is not taken."""
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    return Path(f"{place}.{number}")
