"""Slurm's commands, called. Each answer is None when Slurm does not answer, which says nothing about the jobs."""

import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.sweep.engines.sacct import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    Accounted,
    Queued,
    job_list,
    read_sacct,
    read_scontrol,
    read_squeue,
)

_COMMAND_SECONDS = 60.0
_JOBS_PER_CALL = 500
_SUBMIT_ATTEMPTS = 6

# Said while the controller restarts or is busy; everything else is an answer.
_PASSING = ("unable to contact", "timed out", "temporarily", "connection refused", "try again")

# The user has as many jobs as the site allows: AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit, "job submit limit".
_FULL = ("maxsubmitjob", "job submit limit")


class QueueFullError(Exception):
    """Slurm takes no more jobs of this user for now."""


def need_commands() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"this machine has no Slurm: {', '.join(missing)} not found; run the sweep on a login node, "
            "or choose another engine with --engine"
        )


def queue(job_name: str) -> list[Queued] | None:
    """The tasks of this name that Slurm still has, in one call."""
    answer = _ask("squeue", "-h", "-r", "--me", f"--name={job_name}", "-o", SQUEUE_FORMAT)
    return None if answer is None or answer.returncode else read_squeue(answer.stdout)


def accounted(tasks: Iterable[str]) -> dict[str, Accounted]:
    """How these tasks ended, as far as Slurm knows yet."""
    found: dict[str, Accounted] = {}
    wanted = set(tasks)
    jobs = job_list(wanted)
    for start in range(0, len(jobs), _JOBS_PER_CALL):
        some = ",".join(jobs[start : start + _JOBS_PER_CALL])
        answer = _ask("sacct", "-j", some, "-P", "-n", "-o", SACCT_FORMAT)
        if answer is not None and not answer.returncode:
            found |= read_sacct(answer.stdout)
    for task in wanted - set(found):
        answer = _ask("scontrol", "-o", "show", "job", task)
        found |= read_scontrol(answer.stdout) if answer is not None else {}
    return {task: found[task] for task in wanted & set(found)}


def submit(script: Path, job_name: str) -> str:
    """Submit and return the array's job number. A submission that timed out may have arrived: it is looked for.

    Raises:
        QueueFullError: The user has as many jobs as the site allows.
        InputError: Slurm refuses.
    """
    refusal = ""
    for attempt in range(_SUBMIT_ATTEMPTS):
        if attempt:
            time.sleep(2.0**attempt)
            arrived = [entry for entry in queue(job_name) or () if entry.script == str(script)]
            if arrived:
                return arrived[0].task.partition("_")[0]
        answer = _ask("sbatch", "--parsable", str(script))
        if answer is not None and not answer.returncode:
            return answer.stdout.strip().partition(";")[0]
        refusal = "no answer" if answer is None else answer.stderr.strip()
        if any(text in refusal.lower() for text in _FULL):
            raise QueueFullError(refusal)
        if answer is not None and not any(text in refusal.lower() for text in _PASSING):
            break
    raise InputError(f"sbatch refused {script}: {refusal}; mend the engine's settings and start the sweep again")


def cancel(tasks: Iterable[str]) -> None:
    jobs = job_list(tasks)
    for start in range(0, len(jobs), _JOBS_PER_CALL):
        _ask("scancel", *jobs[start : start + _JOBS_PER_CALL])


def _ask(*command: str) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
