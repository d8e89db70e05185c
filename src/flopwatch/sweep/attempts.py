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

from flopwatch.records.reading import BrokenRecordError, clean_value, read_object, read_record, tail
from flopwatch.records.trial import UNSETTLED, TrialResult, TrialSpec
from flopwatch.records.trial_files import log_file, read_json, read_result, run_folder, trial_folder, write_json

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


# A trial run again by hand never replaces a good result by a worse one.


def is_worse(new: TrialResult, earlier: TrialResult | None) -> bool:
    """Whether the earlier result says more: it was measured and the new one is not, or the new one says nothing."""
    if earlier is None or earlier.outcome in UNSETTLED:
        return False
    return new.outcome in UNSETTLED or (earlier.outcome == "ok" and new.outcome != "ok")


def put_back(sweep: Path, name: str, earlier: str) -> str:
    """Let the earlier attempt have its place again; returns where the new one was put.

    Args:
        sweep: Its folder.
        name: Of the trial.
        earlier: Where `put_aside` put the earlier attempt, within the sweep's folder.
    """
    place = put_aside(sweep, name)
    source, target = sweep / earlier, trial_folder(sweep, name)
    source.rename(target)
    for kept, home in ((target / "log.txt", log_file(sweep, name)), (target / "run", run_folder(sweep, name))):
        if kept.exists() and not home.exists():
            shutil.move(kept, home)
    return place


# A job that Slurm runs again by itself, after `scontrol requeue`, preemption or the death of its node.
#
# The second run finds the first one's claim on the trial, and often a result that says `cancelled`, because Slurm
# stopped the first supervisor. No runner need be alive. Standard library only, like the supervisor.


_SPEC_FILE, _STARTED, _RESULT = "spec.json", "started.json", "result.json"


def slurm_life(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Which job of Slurm this is and how often Slurm has run it again; nothing elsewhere.

    >>> slurm_life({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"})
    {'job': '12_3', 'restarts': 1, 'node': None}
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")
    if not job:
        return {}
    count = environment.get("SLURM_RESTART_COUNT", "0")
    return {"job": job, "restarts": int(count) if count.isdigit() else 0, "node": environment.get("SLURMD_NODENAME")}


def takes_over(sweep: Path, name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Clear the way for the trial if an earlier life of this very job had begun it. False when nothing is left to do.

    Whatever else has the trial, another job or this life of the job itself, is left to the claim to find out.
    """
    life, folder = slurm_life(environment), trial_folder(sweep, name)
    started = read_object(folder / _STARTED)
    is_ours = bool(life) and started.get("job") == life["job"]
    if not is_ours or _count(started.get("restarts")) >= life["restarts"]:
        return True
    result = read_result(folder / _RESULT)
    if result is not None and result.outcome != "cancelled":
        return False  # it had ended before Slurm decided
    job = read_object(folder / _SPEC_FILE)
    try:
        ended = _ended_life(sweep, name, job, started, result)
    except (BrokenRecordError, KeyError):
        return True  # a damaged spec.json: whoever reads it next says so
    if len(ended.earlier_attempts) >= _count(job.get("retries")):
        write_json(folder / _RESULT, ended.to_json())
        return False
    _begin_anew(sweep, name, job, ended)
    return True


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _ended_life(
    sweep: Path, name: str, job: Mapping[str, Any], started: Mapping[str, Any], result: TrialResult | None
) -> TrialResult:
    """How the earlier life ended, were it the last one."""
    earlier = listed_attempts(sweep, name, job["key"])
    environment, began = job.get("environment"), started.get("unix_time")
    where = started.get("node") or started.get("host")
    return TrialResult(
        name=name,
        key=str(job["key"]),
        spec=TrialSpec.from_json(job["spec"]),
        outcome="lost",
        reason=f"Slurm requeued the job (on {where}): preempted, its node failed, or somebody asked for it",
        evidence={"state": "REQUEUED", "job": started["job"], "host": where},
        unix_time=began if isinstance(began, int | float) else None,
        seconds=None if result is None else result.seconds,
        environment=environment if isinstance(environment, dict) else {},
        log_tail=tail(log_file(sweep, name)),
        earlier_attempts=earlier,
    )


def _begin_anew(sweep: Path, name: str, job: Mapping[str, Any], ended: TrialResult) -> None:
    attempts = [*ended.earlier_attempts, attempt_from(ended, put_aside(sweep, name))]
    folder = trial_folder(sweep, name)
    folder.mkdir(parents=True)
    write_json(folder / _SPEC_FILE, {**job, "earlier_attempts": attempts})
