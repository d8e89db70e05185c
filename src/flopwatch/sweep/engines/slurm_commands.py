"""Slurm's commands, called. Each answer is None when Slurm does not answer, which says nothing about the jobs."""

import shutil
import subprocess
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

# Words of slurm_strerror and of sbatch that name what is wrong with the request. Everything else may pass.
_BAD_REQUEST = (
    "invalid partition",
    "invalid account",
    "invalid qos",
    "invalid generic resource",
    "invalid feature",
    "invalid node name",
    "invalid job array",
    "invalid license",
    "invalid wckey",
    "invalid reservation",
    "requested reservation is invalid",
    "time limit is invalid",
    "invalid --",
    "invalid directive",
    "invalid numeric value",
    "invalid time limit",
    "invalid trackable resource",
    "unrecognized option",
    "unknown option",
    "node configuration is not available",
    "node count specification invalid",
    "more processors requested than permitted",
    "memory specification can not be satisfied",
    "memory required by task is not available",
    "not permitted to use this partition",
    "permission denied",
)

# The user has as many jobs as the site allows: AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit, "job submit limit".
_FULL = ("maxsubmitjob", "job submit limit")


class QueueFullError(Exception):
    """Slurm takes no more jobs of this user for now."""


class RefusedError(Exception):
    """Slurm names what is wrong with the request; the message is its words."""


class NotNowError(Exception):
    """Slurm does not answer, or says something that may pass; the message is its words."""


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


def submit(script: Path, job_name: str, *, may_have_arrived: bool) -> str:
    """Submit and return the array's job number.

    Args:
        script: What to submit; its path is how it is found again.
        job_name: Of the arrays of this sweep.
        may_have_arrived: It was offered before and no answer came: it is looked for first, so as not to run twice.

    Raises:
        QueueFullError: The user has as many jobs as the site allows.
        RefusedError: The request is bad.
        NotNowError: Anything else.
    """
    if may_have_arrived:
        there = queue(job_name)
        if there is None:
            raise NotNowError("squeue does not answer")
        if arrived := [entry for entry in there if entry.script == str(script)]:
            return arrived[0].task.partition("_")[0]
    answer = _ask("sbatch", "--parsable", str(script))
    if answer is None:
        raise NotNowError("sbatch does not answer")
    number = answer.stdout.strip().partition(";")[0]
    if not answer.returncode and number.isdigit():
        return number
    raise submission_error(answer.stderr.strip() or answer.stdout.strip() or f"exit code {answer.returncode}")


def submission_error(words: str) -> Exception:
    """What sbatch's words mean.

    >>> type(submission_error("sbatch: error: Slurm controller in standby mode")).__name__
    'NotNowError'
    """
    text, line = words.lower(), " ".join(words.split())
    # First the limits: "job violates accounting/QOS policy (job submit limit, user's size and/or time limits)".
    if any(part in text for part in _FULL):
        return QueueFullError(line)
    return RefusedError(line) if any(part in text for part in _BAD_REQUEST) else NotNowError(line)


def cancel(tasks: Iterable[str], *, only_pending: bool = False) -> None:
    """End the whole arrays of these tasks, or what of them has not begun."""
    jobs = job_list(tasks)
    which = ("--state=PENDING",) if only_pending else ()
    for start in range(0, len(jobs), _JOBS_PER_CALL):
        _ask("scancel", *which, *jobs[start : start + _JOBS_PER_CALL])


def allow_all_nodes(task: str) -> None:
    """Let a waiting task run on the nodes it was kept from."""
    _ask("scontrol", "update", f"jobid={task}", "excnodelist=")


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
