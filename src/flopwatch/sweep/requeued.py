"""A job that Slurm runs again by itself, after `scontrol requeue`, preemption or the death of its node.

The second run finds the first one's claim on the trial, and often a result that says `cancelled`, because Slurm
stopped the first supervisor. No runner need be alive. Standard library only, like the supervisor.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwatch.file_reading import read_object, tail
from flopwatch.record_reading import BrokenRecordError
from flopwatch.sweep.attempts import attempt_from, listed_attempts, put_aside
from flopwatch.trial_files import log_file, read_result, trial_folder, write_json
from flopwatch.trial_records import TrialResult, TrialSpec

_SPEC, _STARTED, _RESULT = "spec.json", "started.json", "result.json"


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
    job = read_object(folder / _SPEC)
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
    write_json(folder / _SPEC, {**job, "earlier_attempts": attempts})
