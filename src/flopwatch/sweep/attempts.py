"""Attempts of a trial that were lost: put aside whole and listed in the next one's `spec.json`.

The list lies in the trial's own folder, so that a killed runner forgets nothing and a job that Slurm runs again can
go on with it while no runner is there. Standard library only: supervisors use it.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch.record_reading import BrokenRecordError, clean_value, read_record
from flopwatch.trial_files import log_file, read_json, run_folder, trial_folder
from flopwatch.trial_records import TrialResult

Attempt: TypeAlias = Mapping[str, Any]
"""One of `TrialResult.earlier_attempts`."""

_SPEC = "spec.json"


@dataclass(frozen=True, slots=True)
class _Told:
    """What of an attempt decides something later."""

    state: str | None = None
    host: str | None = None
    outcome: str = ""


def listed_attempts(sweep: Path, name: str, key: str) -> tuple[Attempt, ...]:
    """What was tried before the attempt whose `spec.json` lies there now, oldest first; nothing of another content."""
    job = read_json(trial_folder(sweep, name) / _SPEC)
    found = job.get("earlier_attempts") if isinstance(job, dict) and job.get("key") == key else None
    return tuple(map(clean_value, filter(_is_whole, found))) if isinstance(found, list) else ()


def _is_whole(entry: object) -> bool:
    try:
        clean_value(entry)
        return read_record(_Told, entry) is not None
    except BrokenRecordError:
        return False


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
