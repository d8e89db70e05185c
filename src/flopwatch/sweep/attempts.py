"""Earlier attempts of a trial: their files, which are moved to `earlier/`, their list, and processes that they left.

The list lies in the trial's `spec.json`, so that it survives if the sweep's process is killed. Supervisors import this
module, so it uses the standard library only.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch import process
from flopwatch.decode import clean_value
from flopwatch.files import read_object, write_json
from flopwatch.records.trial import TrialResult
from flopwatch.records.trial_files import EARLIER, KEPT_LOG, KEPT_RUN, SPEC, STRAYS, log_file, run_folder, trial_folder
from flopwatch.sweep.claim import is_alive_here, own_identity
from flopwatch.sweep.host.processes import is_marked

Attempt: TypeAlias = Mapping[str, Any]
"""An entry of `TrialResult.earlier_attempts`."""


def listed_attempts(sweep: Path, name: str, key: str) -> tuple[Attempt, ...]:
    """The attempts that `trials/NAME/spec.json` lists, oldest first. Empty if the file is for another `Trial.key`."""
    job = read_object(trial_folder(sweep, name) / SPEC)
    listed = job.get("earlier_attempts") if job.get("key") == key else None
    return tuple(
        clean_value(entry) for entry in (listed if isinstance(listed, list) else ()) if isinstance(entry, dict)
    )


def attempt_from(result: TrialResult, folder: str | None) -> Attempt:
    """The entry for an attempt that ended; `folder` is where its files were moved, None if it left no files."""
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
    """Move the trial's folder, log and TensorBoard run to `earlier/NAME.N`; return that path relative to the sweep."""
    place = free_name(sweep / EARLIER / name)
    place.parent.mkdir(exist_ok=True)
    trial_folder(sweep, name).rename(place)
    moves = ((log_file(sweep, name), place / KEPT_LOG), (run_folder(sweep, name), place / KEPT_RUN))
    for home, kept in moves if place.is_dir() else ():
        if os.path.lexists(home) and not os.path.lexists(kept):
            shutil.move(home, kept)
    return str(place.relative_to(sweep))


def free_name(place: Path) -> Path:
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    return Path(f"{place}.{number}")


class Strays:
    """Lists the processes of a trial that have cleared their environment in `strays.json`.

    If the supervisor and its guard are killed together, such processes have neither a parent nor a mark of the trial.
    """

    def __init__(self, trial_dir: Path) -> None:
        self._trial_dir = trial_dir
        self._pids: Sequence[int] = ()
        self._listed: dict[int, int | None] = {}

    def note(self, pids: Sequence[int]) -> None:
        """Update the file if one of these processes, which the last search found, is not marked."""
        if pids is self._pids:
            return
        self._pids = pids
        found = {pid: process.start_ticks(pid) for pid in pids if is_marked(pid, self._trial_dir) is False}
        if found != self._listed:
            self._listed = found
            with contextlib.suppress(OSError):
                write_json(self._trial_dir / STRAYS, {**own_identity(), "processes": list(found.items())})


def kill_strays(trial_dir: Path) -> None:
    content = read_object(trial_dir / STRAYS)
    listed = content.get("processes")
    for entry in listed if isinstance(listed, list) else ():
        with contextlib.suppress(OSError, ValueError, TypeError, OverflowError):
            pid, ticks = entry
            if is_alive_here({**content, "pid": pid, "start_ticks": ticks}) and pid > 1:
                os.kill(pid, signal.SIGKILL)
