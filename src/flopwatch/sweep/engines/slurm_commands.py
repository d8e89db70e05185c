"""Writes batch scripts, calls Slurm's commands and parses their output. None means that Slurm did not answer."""

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.records.trial import TrialSpec

_TIME_MARGIN_SECONDS = 120.0
"""Slurm's time limit is this much larger than the trial's own, so that the supervisor ends the trial first."""

_MEMORY_MARGIN_BYTES = 256 << 20
"""Slurm's memory limit is this much larger than the trial's own, because the supervisor needs memory too."""


@dataclass(frozen=True, slots=True)
class Request:
    """The resources that a task requests from Slurm: cores, GPUs and host memory on each node, and the time limit.

    None means the site's default.
    """

    cpus: int | None
    gpus: int
    memory_megabytes: int | None
    minutes: int | None
    nodes: int = 1

    @property
    def options(self) -> dict[str, object]:
        return {
            "nodes": self.nodes,
            "ntasks": self.nodes,
            "ntasks-per-node": 1 if self.nodes > 1 else None,
            "cpus-per-task": self.cpus,
            "gres": f"gpu:{self.gpus}" if self.gpus else None,
            "mem": None if self.memory_megabytes is None else f"{self.memory_megabytes}M",
            "time": self.minutes,
        }


def request_for(
    spec: TrialSpec, *, cpus: int | None, gpus: float, memory_megabytes: int | None, minutes: int | None
) -> Request:
    """Return a trial's request to Slurm. `cpus` and `gpus` apply if `spec` sets none; the others override its limits.

    GPU fractions are rounded up, because Slurm allocates whole GPUs only.

    >>> request_for(TrialSpec("standard", "tiny", 1, 1), cpus=2, gpus=0.5, memory_megabytes=None, minutes=None)
    Request(cpus=2, gpus=1, memory_megabytes=None, minutes=62, nodes=1)
    """
    wall, limit = spec.limits.wall_seconds, spec.limits.memory_bytes
    if minutes is None and wall is not None:
        minutes = math.ceil((wall + _TIME_MARGIN_SECONDS) / 60)
    if memory_megabytes is None and limit is not None:
        memory_megabytes = math.ceil((limit + _MEMORY_MARGIN_BYTES) / (1 << 20))
    a_core_each = spec.processes if spec.processes > 1 else None
    return Request(
        spec.cpus or cpus or a_core_each, math.ceil(spec.gpus or gpus), memory_megabytes, minutes, spec.nodes
    )


def script(
    job_name: str,
    request: Request,
    names_file: Path,
    tasks: int,
    command: Sequence[str],
    *,
    parallelism: int | None,
    partition: str | None,
    extra: Mapping[str, object],
    avoid: Sequence[str] = (),
) -> str:
    """Return the text of the batch script. Task i runs the command for line i + 1 of the names file.

    Each line contains a trial's name, a blank and its attempt. The script calls the command with exec, so that the
    command receives Slurm's signals.
    """
    wanted = {key.replace("_", "-"): value for key, value in extra.items()}
    options: dict[str, object] = {
        "job-name": job_name,
        "array": f"0-{tasks - 1}" + (f"%{parallelism}" if parallelism else ""),
        "output": str(names_file.with_suffix("")).replace("%", "%%") + "-%a.log",
        "partition": partition,
        **request.options,
        "exclude": ",".join(avoid) or None,
        # Let Slurm run the job again after preemption or a node failure (see flopwatch.sweep.attempts).
        "requeue": True,
        "open-mode": "append",
        **wanted,
    }
    if wanted.get("no-requeue"):
        del options["requeue"]
    return "\n".join(
        [
            "#!/bin/sh",
            *(_option(key, value) for key, value in options.items() if value is not None and value is not False),
            f'trial=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(names_file))})',
            "unset FLOPWATCH_PARENT_PID",
            f'exec {shlex.join(command)} "${{trial% *}}" "${{trial##* }}"',
            "",
        ]
    )


def _option(key: str, value: object) -> str:
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


SQUEUE_FORMAT = "%F_%K|%T|%o"
"""Array job, task, state and script. The script is last, because its path may contain the separator."""

SACCT_FORMAT = "JobID,State,ExitCode,MaxRSS,NodeList"

_UNIT_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

_NOT_OVER = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT")


@dataclass(frozen=True, slots=True)
class Queued:
    """A task in Slurm's queue. `task` is the number of the array job and the index of the task, such as `12_0`."""

    task: str
    is_pending: bool
    script: str


@dataclass(frozen=True, slots=True)
class Accounted:
    """How the batch script of a task ended according to Slurm. None means unknown.

    `state` is for example `COMPLETED`, `FAILED`, `TIMEOUT` or `NODE_FAIL`. `max_rss_bytes` is the largest memory
    use of one of the task's job steps.
    """

    state: str
    exit_code: int | None = None
    signal: int | None = None
    max_rss_bytes: int | None = None
    node: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in _NOT_OVER


def read_squeue(text: str) -> list[Queued]:
    """Parse the output of `squeue -h -r -o SQUEUE_FORMAT`.

    >>> read_squeue("12_0|PENDING|/data/a.sh")
    [Queued(task='12_0', is_pending=True, script='/data/a.sh')]
    """
    rows = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return [Queued(task.strip(), state.strip() == "PENDING", script.strip()) for task, state, script in rows]


def read_sacct(text: str) -> dict[str, Accounted]:
    """Parse the output of `sacct -P -n -o SACCT_FORMAT`; the keys are tasks.

    Slurm prints memory only for the steps of a task. Tasks that have not started, such as `12_[3-5]`, are ignored.

    >>> read_sacct("12_0|CANCELLED by 0|0:15||n1")["12_0"].node
    'n1'
    """
    tasks: dict[str, Accounted] = {}
    step_rss: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 5 or "[" in fields[0]:
            continue
        name, state, exit_code, rss, node = (field.strip() for field in fields)
        task, is_step, _ = name.partition(".")
        if (used := read_bytes(rss)) is not None:
            step_rss[task] = max(used, step_rss.get(task, 0))
        if not is_step:
            code, signal = _read_exit(exit_code)
            where = None if node in ("", "None assigned") else node
            tasks[task] = Accounted(state.partition(" ")[0], code, signal, node=where)
    return {task: replace(found, max_rss_bytes=step_rss.get(task)) for task, found in tasks.items()}


def read_scontrol(text: str) -> dict[str, Accounted]:
    """Parse the output of `scontrol -o show job`; the keys are tasks.

    scontrol is used at sites without accounting. It shows a job only for some minutes after the job has ended.

    >>> read_scontrol("JobId=14 ArrayJobId=12 ArrayTaskId=1 JobState=NODE_FAIL ExitCode=1:0 NodeList=n2")["12_1"].node
    'n2'
    """
    tasks: dict[str, Accounted] = {}
    for line in text.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "ArrayTaskId" not in facts or not facts["ArrayTaskId"].isdigit():
            continue
        code, signal = _read_exit(facts.get("ExitCode", ""))
        node = facts.get("NodeList")
        tasks[f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"] = Accounted(
            facts.get("JobState", ""), code, signal, node=None if node in (None, "", "(null)") else node
        )
    return tasks


def _read_exit(text: str) -> tuple[int | None, int | None]:
    """Return exit code and signal: `7:0` is exit code 7, and `0:9` is signal 9."""
    code, colon, signal = text.partition(":")
    if not colon or not code.isdigit() or not signal.isdigit():
        return None, None
    return (None, int(signal)) if int(signal) else (int(code), None)


def read_bytes(text: str) -> int | None:
    """Parse a size such as `1234K` or `1.5G`; None for an empty text, which Slurm prints if it took no sample.

    >>> read_bytes("1.5G")
    1610612736
    """
    number = text[:-1] if text[-1:] in _UNIT_BYTES else text
    try:
        return int(float(number) * _UNIT_BYTES.get(text[-1:], 1))
    except ValueError:
        return None


def job_list(tasks: Iterable[str]) -> Sequence[str]:
    """Return the array jobs of these tasks, because thousands of single tasks would make a command line too long."""
    return sorted({task.partition("_")[0] for task in tasks}, key=int)


_COMMAND_SECONDS = 60.0  # A busy controller may need tens of seconds to answer.
_JOBS_PER_CALL = 500  # More jobs could make the command line too long.

# Messages of slurm_strerror and of sbatch about a wrong request. All other errors may be temporary.
_BAD_REQUEST = re.compile(
    r"invalid (partition|account|qos|generic resource|feature|node name|job array|license|wckey|reservation|--"
    r"|directive|numeric value|time limit|trackable resource)|requested reservation is invalid|time limit is invalid"
    r"|(unrecognized|unknown) option|node configuration is not available|node count specification invalid"
    r"|more processors requested than permitted|memory specification can not be satisfied"
    r"|memory required by task is not available|not permitted to use this partition|permission denied"
)

# The messages contain AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit or "job submit limit".
_QUEUE_FULL = re.compile("maxsubmitjob|job submit limit")


class QueueFullError(Exception):
    """Slurm accepts no more jobs of this user, because the user has reached the limit on the number of jobs."""


class RefusedError(Exception):
    """Slurm rejects the request as wrong. The text is Slurm's message."""


class NotNowError(Exception):
    """Slurm does not answer, or reports an error that may be temporary. The text is Slurm's message."""


def need_commands() -> None:
    missing = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"Slurm's commands {', '.join(missing)} were not found on this machine; run the sweep on a login node "
            "of the cluster, or choose another engine with --engine"
        )


def queue(job_name: str) -> list[Queued] | None:
    answer = _ask("squeue", "-h", "-r", "--me", f"--name={job_name}", "-o", SQUEUE_FORMAT)
    return None if answer is None or answer.returncode else read_squeue(answer.stdout)


def accounted(tasks: Iterable[str]) -> dict[str, Accounted]:
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
    """Submit a batch script and return the job number of its array.

    If an earlier submission of it failed, it `may_have_arrived`: its job is looked for in Slurm's queue first, so
    that it does not run twice. Raises QueueFullError if the user has reached the limit on the number of jobs,
    RefusedError if the request is wrong, and NotNowError for any other error.
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


def submission_error(message: str) -> Exception:
    """Return the exception that belongs to an error message of sbatch.

    >>> type(submission_error("sbatch: error: Slurm controller in standby mode")).__name__
    'NotNowError'
    """
    text, line = message.lower(), " ".join(message.split())
    # Check for a full queue first, because its message may also match _BAD_REQUEST: "job violates accounting/QOS policy
    # (job submit limit, user's size and/or time limits)".
    if _QUEUE_FULL.search(text):
        return QueueFullError(line)
    return RefusedError(line) if _BAD_REQUEST.search(text) else NotNowError(line)


def cancel(tasks: Iterable[str], *, only_pending: bool = False) -> None:
    """Cancel all tasks of the arrays that these tasks belong to; with `only_pending`, only those not started."""
    jobs = job_list(tasks)
    which = ("--state=PENDING",) if only_pending else ()
    for start in range(0, len(jobs), _JOBS_PER_CALL):
        _ask("scancel", *which, *jobs[start : start + _JOBS_PER_CALL])


def allow_all_nodes(task: str) -> None:
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
