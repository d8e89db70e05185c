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

import hashlib
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.files import UnreadableError, opened_regular, read_object, tail
from flopwatch.records.trial import TrialSpec
from flopwatch.sweep.engines import slurm_commands
from flopwatch.sweep.engines.protocol import Ended
from flopwatch.sweep.engines.slurm_commands import Accounted, Queued, Request, request_for, script
from flopwatch.sweep.folder import Trial, attempt_of, has_begun, is_supervised, result_file

_TICK_SECONDS = 0.05
_SQUEUE_EVERY_SECONDS = 1.0
_FILES_PER_TICK = 256  # Checking more result files at once would load a shared file system.
_GIVE_UP_SECONDS = 30.0  # Slurm's accounting may need this long to report a task that left the queue.
_WITHDRAW_EVERY_SECONDS = 5.0
_AVOID_SECONDS = 600.0  # If no other node became free for this time, a retried trial can use its failed node again.
_LARGEST_ARRAY = 1000  # Slurm's default MaxArraySize is 1001, which allows indices up to 1000.
_TAIL_BYTES = 4000

_FULL_PAUSE_SECONDS = 20.0  # Time until the next submission if the user has too many jobs.
_FIRST_PAUSE_SECONDS = 2.0  # Pause before a retry, unless the user has too many jobs. Each further error doubles it.
_LONGEST_PAUSE_SECONDS = 300.0


@dataclass(slots=True)
class Array:
    """An array job that Slurm has not accepted yet.

    Attributes:
        trials: The trials in the order of the tasks. All request the same resources.
        names: Path of the file with their names. The script is in the same folder.
        texts: The script, and the same without the nodes that it excludes because earlier attempts failed there.
        tries: Number of failed submissions, of which the first was at the time `since`.
        is_full: Whether the last error was that the user has too many jobs. Then the submission is retried without end.
    """

    trials: Sequence[Trial]
    names: Path
    texts: tuple[str, str]
    tries: int = 0
    since: float = 0.0
    next_try: float = 0.0
    message: str = ""
    is_full: bool = False

    @property
    def script(self) -> Path:
        return self.names.with_suffix(".sh")

    def write_script(self, text: str) -> None:
        # A folder's name may contain any bytes. surrogateescape writes them unchanged.
        self.script.write_text(text, encoding="utf-8", errors="surrogateescape")


class Outbox:
    """Submits arrays until Slurm has accepted them.

    A controller that restarts or is overloaded rejects jobs with dozens of different messages. Therefore a submission
    is given up only if the message says that the request is wrong. After all other messages it is retried, for
    `patience_seconds`; after that its trials are recorded as lost.
    """

    def __init__(self, job_name: str, patience_seconds: float) -> None:
        self._job_name, self._patience = job_name, patience_seconds
        self._arrays: list[Array] = []

    def __len__(self) -> int:
        return sum(len(array.trials) for array in self._arrays)

    def add(self, array: Array) -> None:
        array.write_script(array.texts[0])
        self._arrays.append(array)

    def send(self) -> tuple[list[tuple[Array, str]], list[Ended]]:
        """Submit the arrays whose `next_try` has passed.

        Returns those that Slurm accepted with their job numbers, and the trials that will not be submitted again.
        """
        placed, ended = [], []
        for array in [array for array in self._arrays if time.monotonic() >= array.next_try]:
            try:
                placed.append((array, self._submit(array)))
            except slurm_commands.QueueFullError as error:
                array.is_full, array.message = True, str(error)
                array.next_try = time.monotonic() + _FULL_PAUSE_SECONDS
                continue
            except slurm_commands.RefusedError as error:
                ended += [Ended(trial.name, {"state": "REFUSED", "detail": str(error)}) for trial in array.trials]
            except slurm_commands.NotNowError as error:
                if self._postpone(array, str(error)):
                    continue
                detail = f"Slurm did not accept the job for {self._patience / 3600:.3g} h: {error}"
                ended += [Ended(trial.name, {"state": "NOT_TAKEN", "detail": detail}) for trial in array.trials]
            self._arrays.remove(array)
        return placed, ended

    def _submit(self, array: Array) -> str:
        # Slurm may have accepted an earlier submission although sbatch reported an error.
        try:
            return slurm_commands.submit(array.script, self._job_name, may_have_arrived=array.tries > 0)
        except slurm_commands.RefusedError:
            if not array.trials[0].avoid:
                raise
            array.write_script(array.texts[1])  # allow the excluded nodes, because perhaps only they have the resources
            return slurm_commands.submit(array.script, self._job_name, may_have_arrived=False)

    def _postpone(self, array: Array, message: str) -> bool:
        now = time.monotonic()
        array.since = array.since if array.tries else now
        array.next_try = now + min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0**array.tries)
        array.tries, array.is_full, array.message = array.tries + 1, False, message
        return now - array.since <= self._patience

    def take_back(self) -> list[Array]:
        """Remove and return all arrays. Slurm may have accepted some of them although sbatch reported an error."""
        arrays, self._arrays = self._arrays, []
        return arrays

    def state(self) -> str:
        if not self._arrays:
            return ""
        last = max(self._arrays, key=lambda array: array.tries)
        if last.is_full:
            return f"{len(self)} held back: Slurm accepts no more jobs of this user"
        wait = max(0.0, min(array.next_try for array in self._arrays) - time.monotonic())
        return f"{len(self)} held back, next try in {wait:.0f} s: {last.message[:200]}"


@dataclass(slots=True)
class _Task:
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

    def __init__(
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
        self._partition, self._parallelism, self._extra = partition, array_parallelism, dict(extra or {})
        self._defaults: dict[str, Any] = {"cpus": cpus_per_trial, "gpus": gpus_per_trial, "minutes": time_minutes}
        self._defaults["memory_megabytes"] = memory_megabytes
        self._queue_ahead = queue_ahead
        self._tasks: dict[str, _Task] = {}
        self._turn: deque[str] = deque()
        self._patience_seconds = 3600 * patience_hours
        self._refused: list[Ended] = []
        self._next_squeue = 0.0
        self._next_withdrawal = 0.0
        self._silent_since: float | None = None
        self._is_cancelled = False

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """Find the tasks of an earlier runner that are still in Slurm's queue, and return the names of their trials."""
        slurm_commands.need_commands()
        self._sweep = sweep.resolve()
        self._folder = self._sweep / "slurm"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._job_name = "flopwatch-" + hashlib.sha256(os.fsencode(self._sweep)).hexdigest()[:12]
        self._outbox = Outbox(self._job_name, self._patience_seconds)
        queue = slurm_commands.queue(self._job_name)
        if queue is None:
            raise InputError("Slurm does not answer (squeue failed); check that `squeue` works on this host")
        trials = {trial.name: trial for trial in unfinished if not self._has_final_result(trial.name)}
        for entry in queue:
            index = int(entry.task.rpartition("_")[2])
            names = Path(entry.script).with_suffix(".names")
            name, attempt = _line(names, index)
            # Ignore a job of an earlier attempt: its supervisor will see the new attempt and exit.
            if name in trials and name not in self._tasks and attempt == attempt_of(sweep, name):
                self._add(_Task(trials[name], entry.task, _log(names, index), entry.is_pending))
        return list(self._tasks)

    def room(self, next_up: TrialSpec) -> int:
        """Return how many trials to submit, so that enough of them wait in Slurm's queue to keep all nodes busy.

        Return 0 until half of the waiting trials have started, so that many trials are submitted in one array.
        """
        if len(self._outbox):
            return 0
        pending = sum(task.is_pending for task in self._tasks.values())
        wanted = max(self._queue_ahead, len(self._tasks) - pending)
        return min(wanted - pending, _LARGEST_ARRAY) if pending <= wanted // 2 else 0

    def submit(self, trials: Sequence[Trial]) -> None:
        """Submit one array for all trials that request the same resources. The outbox retries failed submissions."""
        by_request: dict[tuple[Request, tuple[str, ...]], list[Trial]] = {}
        for trial in trials:
            by_request.setdefault((request_for(trial.spec, **self._defaults), trial.avoid), []).append(trial)
        for (request, avoid), alike in by_request.items():
            self._outbox.add(self._array(request, avoid, alike))
        self._send()

    def _send(self) -> None:
        placed, ended = self._outbox.send()
        self._refused += ended
        for array, job in placed:
            for index, trial in enumerate(array.trials):
                until = time.monotonic() + _AVOID_SECONDS if trial.avoid else None
                self._add(_Task(trial, f"{job}_{index}", _log(array.names, index), avoids_until=until))

    def _array(self, request: Request, avoid: Sequence[str], trials: Sequence[Trial]) -> Array:
        names = self._folder / f"{uuid.uuid4().hex[:12]}.names"
        names.write_text("".join(f"{trial.name} {attempt_of(self._sweep, trial.name)}\n" for trial in trials))
        command = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep)]

        def text(avoided: Sequence[str]) -> str:
            return script(
                self._job_name,
                request,
                names,
                len(trials),
                command,
                parallelism=self._parallelism,
                partition=self._partition,
                extra=self._extra,
                avoid=avoided,
            )

        return Array(trials, names, (text(avoid), text(())))

    def _add(self, task: _Task) -> None:
        self._tasks[task.trial.name] = task
        self._turn.append(task.trial.name)

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            self._send()
            ended, self._refused = self._refused, []
            ended = ended or self._finished() or self._vanished()
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, _TICK_SECONDS))

    def _finished(self) -> list[Ended]:
        """Return trials that have a result. Each call checks only some files, to limit the load on the file system."""
        ended = []
        for _ in range(min(len(self._turn), _FILES_PER_TICK)):
            name = self._turn.popleft()
            if name not in self._tasks:
                continue
            if self._has_final_result(name):
                ended.append(self._end(name, {}))
            else:
                self._turn.append(name)
        return ended

    def _has_final_result(self, name: str) -> bool:
        """Whether the trial has a result other than `cancelled`.

        If Slurm ends the supervisor, the result is `cancelled`. Only Slurm knows the reason, such as a time limit.
        """
        file = result_file(self._sweep, name)
        if not file.exists():
            return False
        return self._is_cancelled or read_object(file).get("outcome") != "cancelled"

    def _vanished(self) -> list[Ended]:
        now = time.monotonic()
        if now < self._next_squeue or not self._tasks:
            return []
        queue = slurm_commands.queue(self._job_name)
        took = time.monotonic() - now
        # A slow controller is queried less often, so that squeue runs at most a twentieth of the time.
        self._next_squeue = now + max(_SQUEUE_EVERY_SECONDS, 20 * took)
        if queue is None:
            self._silent_since = self._silent_since or now
            return []
        self._silent_since = None
        gone = self._update_tasks(queue, now)
        if not gone:
            return []
        known = slurm_commands.accounted(task.task for task in gone)
        return [self._end(task.trial.name, evidence) for task in gone if (evidence := self._ending(task, known, now))]

    def _update_tasks(self, queue: Sequence[Queued], now: float) -> list[_Task]:
        there = {entry.task: entry for entry in queue}
        gone = []
        for task in self._tasks.values():
            entry = there.get(task.task)
            task.is_pending = entry is not None and entry.is_pending
            if entry is None:
                task.gone_since = task.gone_since or now
                gone.append(task)
                continue
            task.gone_since = None  # Slurm has requeued the task
            if task.is_pending and task.avoids_until is not None and now > task.avoids_until:
                task.avoids_until = None
                slurm_commands.allow_all_nodes(task.task)
        return gone

    def _ending(self, task: _Task, known: Mapping[str, Accounted], now: float) -> dict[str, Any] | None:
        """Return the evidence of a task's end; None while a result or Slurm's accounting may still appear."""
        found = known.get(task.task)
        is_patient = now - (task.gone_since or now) < _GIVE_UP_SECONDS
        name = task.trial.name
        # If a job is COMPLETED without a result, a job of an earlier runner had already started the trial. That earlier
        # job may still be running.
        is_elsewhere = found is not None and found.state == "COMPLETED"
        if (is_patient or is_elsewhere) and is_supervised(self._sweep, name):
            return None
        has_result = result_file(self._sweep, name).exists()
        if is_patient and (found is None or not found.is_over or (found.state == "COMPLETED" and not has_result)):
            return None
        return _evidence(task, found)

    def _end(self, name: str, evidence: Mapping[str, Any]) -> Ended:
        task = self._tasks.pop(name)
        return Ended(name, {"job": task.task, **evidence})

    def end(self, names: Sequence[str]) -> None:
        """Cancel the jobs of these trials. Slurm sends SIGTERM, and SIGKILL after its KillWait."""
        slurm_commands.cancel(self._tasks[name].task for name in names if name in self._tasks)

    def withdraw(self) -> Sequence[str]:
        """Remove pending tasks from Slurm's queue. A task that starts meanwhile may run on, or end as `cancelled`."""
        back = [trial.name for trial in self._take_back()]
        pending = [task for task in self._tasks.values() if task.is_pending]
        if not pending or time.monotonic() < self._next_withdrawal:
            return back
        self._next_withdrawal = time.monotonic() + _WITHDRAW_EVERY_SECONDS
        slurm_commands.cancel((task.task for task in pending), only_pending=True)
        queue = slurm_commands.queue(self._job_name)
        if queue is None:
            return back
        there = {entry.task for entry in queue}
        names = [task.trial.name for task in pending if task.task not in there]
        unrun = [name for name in names if not has_begun(self._sweep, name)]
        for name in unrun:
            del self._tasks[name]
        return back + unrun

    def cancel(self) -> None:
        self._is_cancelled = True
        self._refused += [Ended(trial.name, {"state": "CANCELLED"}) for trial in self._take_back()]
        slurm_commands.cancel(task.task for task in self._tasks.values())

    def _take_back(self) -> list[Trial]:
        """Remove all arrays that wait for submission, and cancel those that Slurm accepted although sbatch failed."""
        arrays = self._outbox.take_back()
        unheard = {str(array.script) for array in arrays if array.tries}
        arrived = (slurm_commands.queue(self._job_name) or ()) if unheard else ()
        slurm_commands.cancel(entry.task for entry in arrived if entry.script in unheard)
        return [trial for array in arrays for trial in array.trials]

    def close(self) -> None:
        """Do nothing, because this engine holds no resources."""

    def state(self) -> str:
        if self._silent_since is not None:
            return f"Slurm has not answered for {time.monotonic() - self._silent_since:.0f} s"
        pending = sum(task.is_pending for task in self._tasks.values())
        counted, held_back = f"{len(self._tasks) - pending} running, {pending} queued", self._outbox.state()
        return f"{counted}, {held_back}" if held_back else counted


def _evidence(task: _Task, found: Accounted | None) -> dict[str, Any]:
    evidence: dict[str, Any] = {"job": task.task, "state": found.state if found else "UNKNOWN"}
    if found is not None:
        facts = {"exit_code": found.exit_code, "signal": found.signal, "host": found.node}
        facts["max_rss_bytes"] = found.max_rss_bytes
        evidence |= {key: value for key, value in facts.items() if value is not None}
    if printed := tail(task.log, _TAIL_BYTES):
        evidence["log"] = printed
    return evidence


def _line(file: Path, index: int) -> tuple[str, str]:
    try:
        with opened_regular(file) as names:
            line = names.read().decode(errors="replace").splitlines()[index]
    except (FileNotFoundError, UnreadableError, IndexError):
        return "", ""
    name, _, attempt = line.rpartition(" ")
    return name, attempt


def _log(names: Path, index: int) -> Path:
    return names.with_name(f"{names.stem}-{index}.log")
