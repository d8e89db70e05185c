"""Earlier attempts of a trial: their files, which are moved to `earlier/`, their list, and processes that they left.

The list lies in the trial's `spec.json`, so that it survives if the sweep's process is killed, and so that a job that
Slurm requeues can add to it without that process. Supervisors import this module, so it uses the standard library only.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from flopwatch import process
from flopwatch.decode import BrokenRecordError, clean_value, read_record
from flopwatch.files import UnreadableError, load_json, read_object, tail, write_json
from flopwatch.records.sweep_results import NewerFormatError, read_current, read_result
from flopwatch.records.trial import UNSETTLED, TrialJob, TrialResult
from flopwatch.records.trial_files import (
    EARLIER,
    KEPT_LOG,
    KEPT_RUN,
    RESULT,
    SPEC,
    STARTED,
    STRAYS,
    log_file,
    run_folder,
    trial_folder,
)
from flopwatch.sweep.host.processes import is_marked
from flopwatch.sweep.lease import is_alive_here, own_identity

Attempt: TypeAlias = Mapping[str, Any]
"""An entry of `TrialResult.earlier_attempts`."""


@dataclass(frozen=True, slots=True)
class _AttemptFacts:
    """The fields of an `Attempt` that must be readable, because the runner uses them to decide on a retry."""

    state: str | None = None
    host: str | None = None
    outcome: str = ""


def listed_attempts(sweep: Path, name: str, key: str) -> tuple[Attempt, ...]:
    """The attempts that `trials/NAME/spec.json` lists, oldest first. Empty if the file is for another `Trial.key`."""
    job = read_object(trial_folder(sweep, name) / SPEC)
    listed, found = job.get("earlier_attempts") if job.get("key") == key else None, []
    for entry in listed if isinstance(listed, list) else ():
        with contextlib.suppress(BrokenRecordError):
            read_record(_AttemptFacts, entry)
            found.append(clean_value(entry))
    return tuple(found)


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
    for home, kept in _log_and_run(sweep, name, place) if place.is_dir() else ():
        if os.path.lexists(home) and not os.path.lexists(kept):
            shutil.move(home, kept)
    return str(place.relative_to(sweep))


def _log_and_run(sweep: Path, name: str, place: Path) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
    """Where the log and the TensorBoard run of a trial lie, and where they are kept in `place`."""
    return (log_file(sweep, name), place / KEPT_LOG), (run_folder(sweep, name), place / KEPT_RUN)


def put_back(sweep: Path, name: str, earlier: str) -> str:
    """Restore the files that `put_aside` moved to `earlier`; return where the current attempt's files were moved."""
    place = put_aside(sweep, name)
    folder = (sweep / earlier).rename(trial_folder(sweep, name))
    for home, kept in _log_and_run(sweep, name, folder):
        if kept.exists() and not home.exists():
            shutil.move(kept, home)
    return place


def is_worse(new: TrialResult, earlier: TrialResult | None) -> bool:
    """Whether the earlier result of a repeated trial is better than the new one, so that the earlier one is kept.

    An `ok` result is better than any other. `cancelled`, `lost` and `skipped` are worse than any other.
    """
    if earlier is None or earlier.outcome in UNSETTLED:
        return False
    return new.outcome in UNSETTLED or (earlier.outcome == "ok" and new.outcome != "ok")


def free_name(place: Path) -> Path:
    number = 1
    while os.path.lexists(f"{place}.{number}"):
        number += 1
    return Path(f"{place}.{number}")


def slurm_job(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The Slurm job of this process, and how often Slurm has restarted it; empty outside of Slurm.

    >>> slurm_job({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"})
    {'job': '12_3', 'restarts': 1, 'node': None}
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")
    if not job:
        return {}
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return {"job": job, "restarts": int(count) if count.isdigit() else 0, "node": environment.get("SLURMD_NODENAME")}


def prepare_after_requeue(sweep: Path, name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Prepare another attempt if Slurm has requeued this job; return False if no attempt is left to run.

    Slurm requeues a job after `scontrol requeue`, preemption or the failure of its node, perhaps after the runner has
    exited. The restarted job finds its own `started.json`, and often a result that says `cancelled`, because Slurm
    stopped the first supervisor. If another process has started the trial, this function changes nothing.
    """
    job, folder = slurm_job(environment), trial_folder(sweep, name)
    started = read_object(folder / STARTED)
    is_ours = bool(job) and started.get("job") == job["job"]
    restarts = started.get("restarts")
    if not is_ours or (restarts if isinstance(restarts, int) else 0) >= job["restarts"]:
        return True
    result = read_result(folder / RESULT)
    if result is not None and result.outcome != "cancelled":
        return False  # the trial had ended before Slurm requeued the job
    try:
        trial_job = read_current(TrialJob, load_json(folder / SPEC))
    except (FileNotFoundError, UnreadableError, BrokenRecordError, NewerFormatError):
        return True  # the supervisor reads the same file next and reports the error
    requeued = _requeued_result(sweep, name, trial_job, started, result)
    if len(requeued.earlier_attempts) >= trial_job.retries:
        write_json(folder / RESULT, requeued.to_json())
        return False
    attempts = (*requeued.earlier_attempts, attempt_from(requeued, put_aside(sweep, name)))
    folder.mkdir(parents=True)
    write_json(folder / SPEC, replace(trial_job, earlier_attempts=attempts).to_json())
    return True


def _requeued_result(
    sweep: Path, name: str, job: TrialJob, started: Mapping[str, Any], result: TrialResult | None
) -> TrialResult:
    began, where = started.get("unix_time"), started.get("node") or started.get("host")
    return TrialResult(
        name=name,
        key=job.key,
        spec=job.spec,
        outcome="lost",
        reason=f"Slurm requeued the job (on {where}), because it was preempted, its node failed, or a user requeued it",
        evidence={"state": "REQUEUED", "job": started["job"], "host": where},
        unix_time=began if isinstance(began, int | float) else None,
        seconds=None if result is None else result.seconds,
        environment=job.environment,
        log_tail=tail(log_file(sweep, name)),
        earlier_attempts=listed_attempts(sweep, name, job.key),
    )


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
