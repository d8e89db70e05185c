"""Runs trials as Slurm array jobs. Needs Slurm's commands (sbatch, squeue, sacct, scancel) and a shared file system.

The files of an array job, where DIR is the sweep's folder and ARRAY a random name:

DIR/slurm/
  ARRAY.names         one line per task: the name of its trial and the attempt
  ARRAY.sh            the batch script
  ARRAY-INDEX.log     the output of Slurm and of the supervisor of task INDEX

The files are written before the job is submitted, and job numbers are not stored. A new runner finds the jobs of an
earlier one in Slurm's queue by the path of their script, so no job is lost if the earlier runner was killed.

submitit is not used: it took 0.8 s more per trial, because it starts a second Python and srun (11.3 s instead of 7.4 s
for 20 tasks of 1 s on four cores). It also writes files after submitting, and a killed runner would not write them.
"""

import contextlib
import hashlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flopwatch.errors import InputError
from flopwatch.files import read_object, tail
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.folder import Trial, attempt_of, has_begun, is_supervised, result_file

_TICK_SECONDS = 0.05
_SQUEUE_EVERY_SECONDS = 1.0
_COMMAND_SECONDS = 60.0  # A busy controller may need tens of seconds to answer.
_JOBS_PER_CALL = 500  # More jobs could make the command line too long.
_FILES_PER_TICK = 256  # Checking more result files at once would load a shared file system.
_GIVE_UP_SECONDS = 30.0  # Slurm's accounting may need this long to report a task that left the queue.
_WITHDRAW_EVERY_SECONDS = 5.0
_AVOID_SECONDS = 600.0  # If no other node became free for this time, a retried trial can use its failed node again.
_LARGEST_ARRAY = 1000  # Slurm's default MaxArraySize is 1001, which allows indices up to 1000.
_TAIL_BYTES = 4000

_FULL_PAUSE_SECONDS = 20.0  # Time until the next submission if the user has too many jobs.
_FIRST_PAUSE_SECONDS = 2.0  # Pause before a retry, unless the user has too many jobs. Each further error doubles it.
_LONGEST_PAUSE_SECONDS = 300.0

# Slurm's limits are larger than the trial's own, so that the supervisor, which needs memory too, ends the trial first.
_TIME_MARGIN_SECONDS = 120.0
_MEMORY_MARGIN_BYTES = 256 << 20

_NOT_OVER = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "RESIZING", "STAGE_OUT")

# Messages of slurm_strerror and of sbatch about a wrong request. All other errors may be temporary.
_BAD_REQUEST = re.compile(
    r"invalid (partition|account|qos|generic resource|feature|node name|job array|license|wckey|reservation|--"
    r"|directive|numeric value|time limit|trackable resource)|requested reservation is invalid|time limit is invalid"
    r"|(unrecognized|unknown) option|node configuration is not available|node count specification invalid"
    r"|more processors requested than permitted|memory specification can not be satisfied"
    r"|memory required by task is not available|not permitted to use this partition|permission denied",
    re.IGNORECASE,
)

# The messages contain AssocMaxSubmitJobLimit, QOSMaxSubmitJobPerUserLimit or "job submit limit".
_QUEUE_FULL = re.compile("maxsubmitjob|job submit limit", re.IGNORECASE)

Options = dict[str, object]
"""Options of sbatch without `--`; None and False leave one out, True is an option without a value."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What the jobs of a sweep request from Slurm. The fields are arguments of SlurmEngine."""

    partition: str | None = None
    time_minutes: int | None = None
    gpus_per_trial: float = 0
    cpus_per_trial: int | None = None
    memory_megabytes: int | None = None
    array_parallelism: int | None = None
    extra: Mapping[str, Any] | None = None

    def options(self, spec: TrialSpec) -> Options:
        """Return the options of a trial's job, without those of the array that the trial will be in.

        GPU fractions are rounded up, because Slurm allocates whole GPUs only.

        >>> Requests(partition="long").options(TrialSpec("standard", "tiny", 1, 1, gpus=0.5))["gres"]
        'gpu:1'
        """
        minutes, wall = self.time_minutes, spec.limits.wall_seconds
        if minutes is None and wall is not None:
            minutes = math.ceil((wall + _TIME_MARGIN_SECONDS) / 60)
        megabytes, limit = self.memory_megabytes, spec.limits.memory_bytes
        if megabytes is None and limit is not None:
            megabytes = math.ceil((limit + _MEMORY_MARGIN_BYTES) / (1 << 20))
        gpus = math.ceil(spec.gpus or self.gpus_per_trial)
        return {
            "partition": self.partition,
            "nodes": 1,
            "ntasks": 1,
            "cpus-per-task": spec.cpus or self.cpus_per_trial or (spec.processes if spec.processes > 1 else None),
            "gres": f"gpu:{gpus}" if gpus else None,
            "mem": None if megabytes is None else f"{megabytes}M",
            "time": minutes,
        }

    def script(self, job_name: str, names_file: Path, tasks: int, command: Sequence[str], options: Options) -> str:
        """Return the text of the batch script. Task i runs the command for line i + 1 of the names file.

        Each line contains a trial's name, a blank and its attempt. The script calls the command with exec, so that the
        command receives Slurm's signals.
        """
        extra = {key.replace("_", "-"): value for key, value in (self.extra or {}).items()}
        every: Options = {
            "job-name": job_name,
            "array": f"0-{tasks - 1}" + (f"%{self.array_parallelism}" if self.array_parallelism else ""),
            "output": str(names_file.with_suffix("")).replace("%", "%%") + "-%a.log",
            **options,
            # Let Slurm run the job again after preemption or a node failure (see flopwatch.sweep.attempts).
            "requeue": not extra.get("no-requeue"),
            "open-mode": "append",
            **extra,
        }
        return "\n".join(
            [
                "#!/bin/sh",
                *(_option(key, value) for key, value in every.items() if value is not None and value is not False),
                f'trial=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(names_file))})',
                "unset FLOPWATCH_PARENT_PID",
                f'exec {shlex.join(command)} "${{trial% *}}" "${{trial##* }}"',
                "",
            ]
        )


def _option(key: str, value: object) -> str:
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


class Queued(NamedTuple):
    task: str  # the number of the array job and the index of the task, such as `12_0`
    is_pending: bool
    script: str


class Accounted(NamedTuple):
    """How the batch script of a task ended according to Slurm. None means unknown."""

    state: str  # such as `COMPLETED`, `FAILED`, `TIMEOUT` or `NODE_FAIL`
    exit_code: int | None = None
    signal: int | None = None
    max_rss_bytes: int | None = None  # the largest memory use of one of the task's job steps
    host: str | None = None

    @property
    def is_over(self) -> bool:
        return self.state not in _NOT_OVER


def read_squeue(text: str) -> list[Queued]:
    """Parse the output of `squeue -h -r -o "%F_%K|%T|%o"`: array job, task, state and script.

    The script is last, because its path may contain the separator.

    >>> read_squeue("12_0|PENDING|/data/a.sh")
    [Queued(task='12_0', is_pending=True, script='/data/a.sh')]
    """
    rows = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return [Queued(task.strip(), state.strip() == "PENDING", script.strip()) for task, state, script in rows]


def read_sacct(text: str) -> dict[str, Accounted]:
    """Parse the output of `sacct -P -n -o JobID,State,ExitCode,MaxRSS,NodeList`; the keys are tasks.

    Slurm prints memory only for the steps of a task. Tasks that have not started, such as `12_[3-5]`, are ignored.

    >>> read_sacct("12_0|CANCELLED by 0|0:15||n1")["12_0"].host
    'n1'
    """
    tasks: dict[str, Accounted] = {}
    step_rss: dict[str, int] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 5 or "[" in fields[0]:
            continue
        name, state, exit_code, rss, node = fields
        task, is_step, _ = name.partition(".")
        if (used := read_bytes(rss)) is not None:
            step_rss[task] = max(used, step_rss.get(task, 0))
        if not is_step:
            where = None if node in ("", "None assigned") else node
            tasks[task] = Accounted(state.partition(" ")[0], *_read_exit(exit_code), host=where)
    return {task: found._replace(max_rss_bytes=step_rss.get(task)) for task, found in tasks.items()}


def read_scontrol(text: str) -> dict[str, Accounted]:
    """Parse the output of `scontrol -o show job`; the keys are tasks.

    scontrol is used at sites without accounting. It shows a job only for some minutes after the job has ended.

    >>> read_scontrol("JobId=14 ArrayJobId=12 ArrayTaskId=1 JobState=NODE_FAIL ExitCode=1:0 NodeList=n2")["12_1"].host
    'n2'
    """
    tasks = {}
    for line in text.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if facts.get("ArrayTaskId", "").isdigit():
            node = None if facts["NodeList"] in ("", "(null)") else facts["NodeList"]
            task = f"{facts['ArrayJobId']}_{facts['ArrayTaskId']}"
            tasks[task] = Accounted(facts["JobState"], *_read_exit(facts["ExitCode"]), host=node)
    return tasks


def _read_exit(text: str) -> tuple[int | None, int | None]:
    """Return exit code and signal: `7:0` is exit code 7, and `0:9` is signal 9."""
    found = re.fullmatch(r"(\d+):(\d+)", text)
    code, signal = map(int, found.groups()) if found else (None, None)
    return (None, signal) if signal else (code, None)


def read_bytes(text: str) -> int | None:
    """Parse a size such as `1234K` or `1.5G`; None for an empty text, which Slurm prints if it took no sample.

    >>> read_bytes("1.5G")
    1610612736
    """
    found = re.fullmatch(r"([\d.]+)([KMGT]?)", text)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else None


def job_lists(tasks: Iterable[str]) -> list[list[str]]:
    """Return the array jobs of these tasks, because thousands of single tasks would make a command line too long.

    >>> job_lists(["10_3", "9_0", "10_4"])
    [['9', '10']]
    """
    jobs = sorted({task.partition("_")[0] for task in tasks}, key=int)
    return [jobs[start : start + _JOBS_PER_CALL] for start in range(0, len(jobs), _JOBS_PER_CALL)]


def _ask(*command: str) -> "subprocess.CompletedProcess[str]":
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
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} does not answer")


def _queue(job_name: str) -> list[Queued] | None:
    """Return the sweep's tasks in Slurm's queue; None if Slurm does not answer."""
    answer = _ask("squeue", "-h", "-r", "--me", f"--name={job_name}", "-o", "%F_%K|%T|%o")
    return None if answer.returncode else read_squeue(answer.stdout)


def _accounted(tasks: Iterable[str]) -> dict[str, Accounted]:
    wanted = set(tasks)
    found: dict[str, Accounted] = {}
    for jobs in job_lists(wanted):
        answer = _ask("sacct", "-j", ",".join(jobs), "-P", "-n", "-o", "JobID,State,ExitCode,MaxRSS,NodeList")
        found |= {} if answer.returncode else read_sacct(answer.stdout)
    for task in wanted - set(found):
        found |= read_scontrol(_ask("scontrol", "-o", "show", "job", task).stdout)
    return found


def _cancel(tasks: Iterable[str], *options: str) -> None:
    """Cancel all tasks of the arrays that these tasks belong to."""
    for jobs in job_lists(tasks):
        _ask("scancel", *options, *jobs)


class SubmissionError(Exception):
    """Slurm did not accept a job. The text is Slurm's message, on one line.

    `kind` is `full` if the user has reached the limit on the number of jobs, `refused` if the request is wrong, and
    `later` if Slurm does not answer or the error may be temporary.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
        # Look for a full queue first, because its message may also match _BAD_REQUEST: "job violates accounting/QOS
        # policy (job submit limit, user's size and/or time limits)".
        is_full, is_refused = _QUEUE_FULL.search(message), _BAD_REQUEST.search(message)
        self.kind: Literal["full", "refused", "later"] = "full" if is_full else "refused" if is_refused else "later"


@dataclass(slots=True)
class Array:
    """An array job that Slurm has not accepted yet.

    Attributes:
        trials: The trials in the order of the tasks. All request the same resources.
        names: Path of the file with their names. The script is in the same folder.
        text: The batch script, which excludes nodes on which earlier attempts failed, `Trial.avoid`.
        tries: Number of failed submissions, of which the first was at the time `since`.
        error: The last error. If the user has too many jobs, the submission is retried without end.
    """

    job_name: str
    trials: Sequence[Trial]
    names: Path
    text: str
    tries: int = 0
    since: float = 0.0
    next_try: float = 0.0
    error: SubmissionError | None = None

    @property
    def script(self) -> Path:
        return self.names.with_suffix(".sh")

    def write_script(self) -> None:
        # A folder's name may contain any bytes. surrogateescape writes them unchanged.
        self.script.write_text(self.text, encoding="utf-8", errors="surrogateescape")

    def submit(self) -> str:
        """Submit the batch script and return the job number; raises SubmissionError.

        Slurm may have accepted an earlier submission although sbatch reported an error. Therefore the job of an earlier
        one is looked for in Slurm's queue first, so that it does not run twice.
        """
        if self.tries:
            there = _queue(self.job_name)
            if there is None:
                raise SubmissionError("squeue does not answer")
            if arrived := [entry for entry in there if entry.script == str(self.script)]:
                return arrived[0].task.partition("_")[0]
        try:
            return self._sbatch()
        except SubmissionError as error:
            excluded = _option("exclude", ",".join(self.trials[0].avoid)) + "\n"
            if error.kind != "refused" or excluded not in self.text:
                raise
            self.text = self.text.replace(excluded, "")  # perhaps only these nodes have the resources
            self.write_script()
            return self._sbatch()

    def _sbatch(self) -> str:
        answer = _ask("sbatch", "--parsable", str(self.script))
        number = answer.stdout.strip().partition(";")[0]
        if answer.returncode or not number.isdigit():
            raise SubmissionError(answer.stderr.strip() or answer.stdout.strip() or f"exit code {answer.returncode}")
        return number


class Submissions:
    """Submits arrays until Slurm has accepted them.

    A controller that restarts or is overloaded rejects jobs with dozens of different messages. Therefore a submission
    is given up only if the message says that the request is wrong. After all other messages it is retried, for
    `patience_seconds`; after that its trials are recorded as lost.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._arrays: list[Array] = []
        self.given_up: list[Ended] = []  # the trials that will not be submitted again; the engine removes them

    def __len__(self) -> int:
        return sum(len(array.trials) for array in self._arrays)

    def add(self, array: Array) -> None:
        array.write_script()
        self._arrays.append(array)

    def send(self) -> list[tuple[Array, str]]:
        """Submit the arrays whose `next_try` has passed; return those that Slurm accepted with their job numbers."""
        placed = []
        for array in [array for array in self._arrays if time.monotonic() >= array.next_try]:
            try:
                placed.append((array, array.submit()))
            except SubmissionError as error:
                evidence = self._why_given_up(array, error)
                if evidence is None:
                    continue
                self.given_up += [Ended(trial.name, evidence) for trial in array.trials]
            self._arrays.remove(array)
        return placed

    def _why_given_up(self, array: Array, error: SubmissionError) -> dict[str, Any] | None:
        """Return the evidence of the end of the array's trials; None if the array will be submitted again."""
        now, array.error = time.monotonic(), error
        if error.kind == "refused":
            return {"state": "REFUSED", "detail": str(error)}
        if error.kind == "full":
            array.next_try = now + _FULL_PAUSE_SECONDS
            return None
        array.since = array.since if array.tries else now
        array.next_try = now + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** min(array.tries, 30))
        array.tries += 1
        if now - array.since <= self._patience:
            return None
        detail = f"Slurm did not accept the job for {self._patience / 3600:.3g} h: {error}"
        return {"state": "NOT_TAKEN", "detail": detail}

    def take_back(self) -> list[Array]:
        """Remove and return all arrays. Slurm may have accepted some of them although sbatch reported an error."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def state(self) -> str:
        if not self._arrays:
            return ""
        last = max(self._arrays, key=lambda array: array.tries)
        if last.error is not None and last.error.kind == "full":
            return f"{len(self)} held back: Slurm accepts no more jobs of this user"
        wait = max(0.0, min(array.next_try for array in self._arrays) - time.monotonic())
        return f"{len(self)} held back, next try in {wait:.0f} s: {str(last.error or '')[:200]}"


@dataclass(slots=True)
class _SlurmTask:
    """A submitted trial.

    `gone_since` is the time at which the task was first missing in Slurm's queue; None if it is in the queue. Before
    `avoids_until`, the task must not run on the node of its failed attempt; None means that all nodes are allowed.
    """

    trial: Trial
    task: str
    log: Path
    is_pending: bool = True
    gone_since: float | None = None
    avoids_until: float | None = None

    def ended(self, evidence: Mapping[str, Any]) -> Ended:
        return Ended(self.trial.name, {"job": self.task, **evidence})


class SlurmEngine:
    """Runs trials as tasks of Slurm array jobs. The sweep's folder must be on a file system that all nodes share.

    Args:
        partition: The partition; None means the site's default.
        time_minutes: Slurm's time limit of a trial; None means the trial's own limit plus two minutes.
        gpus_per_trial: Number of GPUs of a trial whose configuration does not set it.
        cpus_per_trial: Number of cores of a trial whose configuration does not set it.
        memory_megabytes: Host memory; None means the trial's limit plus 256 MB, or the site's default if there is none.
        array_parallelism: Largest number of tasks of one array that run at once.
        queue_ahead: Number of trials to keep waiting in Slurm's queue, but at least as many as are running.
        extra: Further options of sbatch: `{"account": "lab", "qos": "long", "exclusive": True}`.
        patience_hours: How long a failing submission is retried. After that its trials are recorded as lost.
    """

    name = "slurm"

    def __init__(  # noqa: PLR0913, PLR0917 - the options of the engine
        self,
        partition: str | None = None,
        time_minutes: int | None = None,
        gpus_per_trial: float = 0,
        cpus_per_trial: int | None = None,
        memory_megabytes: int | None = None,
        array_parallelism: int | None = None,
        queue_ahead: int = 32,
        extra: Mapping[str, Any] | None = None,
        patience_hours: float = 24.0,
    ) -> None:
        self._requests = Requests(
            partition, time_minutes, gpus_per_trial, cpus_per_trial, memory_megabytes, array_parallelism, extra
        )
        self._queue_ahead = queue_ahead
        self._submissions = Submissions(3600 * patience_hours)
        self._tasks: dict[str, _SlurmTask] = {}  # by the names of their trials; `_finished` checks the first ones next
        self._next_squeue = self._next_withdrawal = 0.0
        self._silent_since: float | None = None
        self._is_cancelled = False

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Find the tasks of an earlier runner that are still in Slurm's queue, and return the names of their trials."""
        if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
            raise InputError(
                f"Slurm's commands {', '.join(missing)} were not found on this machine; run the sweep on a login node "
                "of the cluster, or choose another engine with --engine"
            )
        self._sweep = sweep.resolve()
        (self._sweep / "slurm").mkdir(parents=True, exist_ok=True)
        self._job_name = "flopwatch-" + hashlib.sha256(os.fsencode(self._sweep)).hexdigest()[:12]
        queue = _queue(self._job_name)
        if queue is None:
            raise InputError("Slurm does not answer (squeue failed); check that `squeue` works on this host")
        trials = {trial.name: trial for trial in unfinished if not self._has_final_result(trial.name)}
        for entry in queue:
            index = int(entry.task.rpartition("_")[2])
            names = Path(entry.script).with_suffix(".names")
            name, attempt = _line(names, index)
            # Ignore a job of an earlier attempt: its supervisor will see the new attempt and exit.
            if name in trials and name not in self._tasks and attempt == attempt_of(sweep, name):
                self._tasks[name] = _SlurmTask(trials[name], entry.task, _log(names, index), entry.is_pending)
        return list(self._tasks)

    def room(self, next_up: TrialSpec) -> int:
        """Return how many trials to submit, so that enough of them wait in Slurm's queue to keep all nodes busy.

        Return 0 until half of the waiting trials have started, so that many trials are submitted in one array.
        """
        if len(self._submissions):
            return 0
        pending = sum(task.is_pending for task in self._tasks.values())
        wanted = max(self._queue_ahead, len(self._tasks) - pending)
        return min(wanted - pending, _LARGEST_ARRAY) if pending <= wanted // 2 else 0

    def submit(self, trials: Sequence[Trial]) -> None:
        """Submit one array for all trials that request the same resources. Failed submissions are retried."""
        arrays: dict[Any, tuple[Options, list[Trial]]] = {}
        for trial in trials:
            options = {**self._requests.options(trial.spec), "exclude": ",".join(trial.avoid) or None}
            arrays.setdefault(tuple(options.values()), (options, []))[1].append(trial)
        for options, alike in arrays.values():
            names = self._sweep / "slurm" / f"{uuid.uuid4().hex[:12]}.names"
            names.write_text("".join(f"{trial.name} {attempt_of(self._sweep, trial.name)}\n" for trial in alike))
            command = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep)]
            text = self._requests.script(self._job_name, names, len(alike), command, options)
            self._submissions.add(Array(self._job_name, alike, names, text))
        self._send()

    def _send(self) -> None:
        for array, job in self._submissions.send():
            for index, trial in enumerate(array.trials):
                until = time.monotonic() + _AVOID_SECONDS if trial.avoid else None
                task = _SlurmTask(trial, f"{job}_{index}", _log(array.names, index), avoids_until=until)
                self._tasks[trial.name] = task

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            self._send()
            ended, self._submissions.given_up = self._submissions.given_up, []
            ended = ended or self._finished() or self._vanished()
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, _TICK_SECONDS))

    def _finished(self) -> list[Ended]:
        """Return trials that have a result. Each call checks only some files, to limit the load on the file system."""
        ended = []
        for name in list(islice(self._tasks, _FILES_PER_TICK)):
            task = self._tasks.pop(name)
            if self._has_final_result(name):
                ended.append(task.ended({}))
            else:
                self._tasks[name] = task
        return ended

    def _has_final_result(self, name: str) -> bool:
        """Whether the trial has a result other than `cancelled`.

        If Slurm ends the supervisor, the result is `cancelled`. Only Slurm knows the reason, such as a time limit.
        """
        file = result_file(self._sweep, name)
        return file.exists() and (self._is_cancelled or read_object(file).get("outcome") != "cancelled")

    def _vanished(self) -> list[Ended]:
        now = time.monotonic()
        if now < self._next_squeue or not self._tasks:
            return []
        queue = _queue(self._job_name)
        # A slow controller is queried less often, so that squeue runs at most a twentieth of the time.
        self._next_squeue = now + max(_SQUEUE_EVERY_SECONDS, 20 * (time.monotonic() - now))
        if queue is None:
            self._silent_since = self._silent_since or now
            return []
        self._silent_since = None
        gone = self._update_tasks(queue, now)
        known = _accounted(task.task for task in gone)
        return [
            self._tasks.pop(task.trial.name).ended(evidence)
            for task in gone
            if (evidence := self._evidence(task, known.get(task.task), now)) is not None
        ]

    def _update_tasks(self, queue: Sequence[Queued], now: float) -> list[_SlurmTask]:
        """Note which tasks are pending; return those that have left the queue."""
        is_pending = {entry.task: entry.is_pending for entry in queue}
        for task in self._tasks.values():
            task.is_pending = is_pending.get(task.task, False)
            # A task that has left the queue is there again if Slurm has requeued it.
            task.gone_since = None if task.task in is_pending else task.gone_since or now
            if task.is_pending and task.avoids_until is not None and now > task.avoids_until:
                task.avoids_until = None
                _ask("scontrol", "update", f"jobid={task.task}", "excnodelist=")
        return [task for task in self._tasks.values() if task.gone_since is not None]

    def _evidence(self, task: _SlurmTask, found: Accounted | None, now: float) -> dict[str, Any] | None:
        """Return the evidence of a task's end; None while a result or Slurm's accounting may still appear."""
        name, is_patient = task.trial.name, now - (task.gone_since or now) < _GIVE_UP_SECONDS
        # If a job is COMPLETED without a result, a job of an earlier runner had already started the trial. That earlier
        # job may still be running.
        is_completed = found is not None and found.state == "COMPLETED"
        if (is_patient or is_completed) and is_supervised(self._sweep, name):
            return None
        is_told = found is not None and found.is_over and (not is_completed or result_file(self._sweep, name).exists())
        if is_patient and not is_told:
            return None
        facts = {**(found or Accounted("UNKNOWN"))._asdict(), "log": tail(task.log, _TAIL_BYTES) or None}
        return {key: value for key, value in facts.items() if value is not None}

    def end(self, names: Sequence[str]) -> None:
        """Cancel the jobs of these trials. Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        _cancel(self._tasks[name].task for name in names if name in self._tasks)

    def withdraw(self) -> Sequence[str]:
        """Remove pending tasks from Slurm's queue. A task that starts meanwhile may run on, or end as `cancelled`."""
        back = [trial.name for trial in self._take_back()]
        pending = [task for task in self._tasks.values() if task.is_pending]
        if not pending or time.monotonic() < self._next_withdrawal:
            return back
        self._next_withdrawal = time.monotonic() + _WITHDRAW_EVERY_SECONDS
        _cancel((task.task for task in pending), "--state=PENDING")
        queue = _queue(self._job_name)
        if queue is None:
            return back
        there = {entry.task for entry in queue}
        names = [task.trial.name for task in pending if task.task not in there]
        return back + [self._tasks.pop(name).trial.name for name in names if not has_begun(self._sweep, name)]

    def cancel(self) -> None:
        self._is_cancelled = True
        self._submissions.given_up += [Ended(trial.name, {"state": "CANCELLED"}) for trial in self._take_back()]
        _cancel(task.task for task in self._tasks.values())

    def _take_back(self) -> list[Trial]:
        """Remove all arrays that wait for submission, and cancel those that Slurm accepted although sbatch failed."""
        arrays = self._submissions.take_back()
        unheard = {str(array.script) for array in arrays if array.tries}
        arrived = (_queue(self._job_name) or ()) if unheard else ()
        _cancel(entry.task for entry in arrived if entry.script in unheard)
        return [trial for array in arrays for trial in array.trials]

    def close(self) -> None:
        """Do nothing, because this engine holds no resources."""

    def state(self) -> str:
        if self._silent_since is not None:
            return f"Slurm has not answered for {time.monotonic() - self._silent_since:.0f} s"
        pending = sum(task.is_pending for task in self._tasks.values())
        counted, held_back = f"{len(self._tasks) - pending} running, {pending} queued", self._submissions.state()
        return f"{counted}, {held_back}" if held_back else counted


def _line(file: Path, index: int) -> tuple[str, str]:
    with contextlib.suppress(OSError, IndexError):
        name, _, attempt = file.read_text(errors="replace").splitlines()[index].rpartition(" ")
        return name, attempt
    return "", ""


def _log(names: Path, index: int) -> Path:
    return names.with_name(f"{names.stem}-{index}.log")
