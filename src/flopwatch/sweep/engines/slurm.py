"""Trials as array jobs of Slurm. Needs its commands (sbatch, squeue, sacct, scancel) and a shared file system.

Submitted with a script of our own: the same through submitit cost 0.8 s more per trial (its second Python and srun),
11.3 s instead of 7.4 s for 20 tasks of 1 s on four cores, and an array submitted by a runner that was then killed
could not run, since submitit puts its pickles in place only afterwards.

DIR/slurm/
  BATCH.names         one trial and its attempt per line, written before the array is submitted
  BATCH.sh            the script of the array: how its tasks are found again by a new runner
  BATCH-INDEX.log     what Slurm and the supervisor printed

Job numbers are not written down: Slurm itself tells a new runner which tasks of which script it has, so there is no
moment between submitting and writing in which a runner could die.
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
from flopwatch.file_reading import UnreadableError, opened_regular, read_object
from flopwatch.sweep.engines import slurm_commands
from flopwatch.sweep.engines.protocol import Ended, Trial
from flopwatch.sweep.engines.sacct import Accounted, Queued
from flopwatch.sweep.engines.slurm_script import Request, request_for, script
from flopwatch.sweep.folder import attempt_of, is_supervised, result_file
from flopwatch.trial_records import TrialSpec

_TICK_SECONDS = 0.05
_SQUEUE_EVERY_SECONDS = 1.0
_FILES_PER_TICK = 256
_GIVE_UP_SECONDS = 30.0
_FULL_PAUSE_SECONDS = 20.0
_LARGEST_ARRAY = 1000
"""Slurm's MaxArraySize is 1001 unless a site changes it."""
_TAIL_BYTES = 4000


@dataclass(slots=True)
class _Task:
    """A trial that is out; `gone_since` is when Slurm was first seen without it."""

    trial: Trial
    task: str
    log: Path
    is_pending: bool = True
    gone_since: float | None = None


class SlurmEngine:
    """Places trials as tasks of Slurm array jobs.

    Args:
        partition: Where they go; None is the site's default.
        time_minutes: Slurm's time limit of a trial; None is its own wall limit and two minutes.
        gpus_per_trial: GPUs of a trial whose configuration does not say.
        cpus_per_trial: Cores of a trial whose configuration does not say.
        memory_megabytes: Host memory; None is the trial's own limit and 256 MB, or what the site gives.
        array_parallelism: Most tasks of one array at once.
        queue_ahead: Trials waiting in Slurm's queue, at least; as many as are running, if those are more.
        extra: Further options of sbatch: `{"account": "lab", "qos": "long", "exclusive": True}`.

    The sweep's folder must be on a file system the nodes share.
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
    ) -> None:
        self._partition, self._parallelism, self._extra = partition, array_parallelism, dict(extra or {})
        self._minutes, self._memory_megabytes = time_minutes, memory_megabytes
        self._gpus, self._cpus = gpus_per_trial, cpus_per_trial
        self._queue_ahead = queue_ahead
        self._tasks: dict[str, _Task] = {}
        self._turn: deque[str] = deque()
        self._held_back: list[Trial] = []
        self._next_squeue = 0.0
        self._next_submit = 0.0
        self._silent_since: float | None = None
        self._is_cancelled = False

    def open(self, sweep: Path, unfinished: Sequence[Trial]) -> Sequence[str]:
        """What an earlier runner submitted and Slurm still has is waited for, pending or running."""
        slurm_commands.need_commands()
        self._sweep = sweep.resolve()
        self._folder = self._sweep / "slurm"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._job_name = "flopwatch-" + hashlib.sha256(str(self._sweep).encode()).hexdigest()[:12]
        queue = slurm_commands.queue(self._job_name)
        if queue is None:
            raise InputError("Slurm does not answer (squeue failed); see whether `squeue` works here")
        trials = {trial.name: trial for trial in unfinished if not result_file(sweep, trial.name).exists()}
        for entry in queue:
            index = int(entry.task.rpartition("_")[2])
            names = Path(entry.script).with_suffix(".names")
            name, attempt = _line(names, index)
            # A job of an earlier attempt finds another's token and leaves.
            if name in trials and name not in self._tasks and attempt == attempt_of(sweep, name):
                self._add(_Task(trials[name], entry.task, _log(names, index), entry.is_pending))
        return list(self._tasks)

    def room(self, next_up: TrialSpec) -> int:
        """Enough that no node waits for us, in steps of half of it so that arrays stay large."""
        if self._held_back:
            return 0
        pending = sum(task.is_pending for task in self._tasks.values())
        wanted = max(self._queue_ahead, len(self._tasks) - pending)
        return min(wanted - pending, _LARGEST_ARRAY) if pending <= wanted // 2 else 0

    def submit(self, trials: Sequence[Trial]) -> None:
        """One array for all that ask for the same. What a full queue does not take is submitted later."""
        by_request: dict[Request, list[Trial]] = {}
        for trial in trials:
            by_request.setdefault(self._request(trial.spec), []).append(trial)
        for request, alike in by_request.items():
            try:
                self._submit_array(request, alike)
            except slurm_commands.QueueFullError:
                self._held_back += alike
                self._next_submit = time.monotonic() + _FULL_PAUSE_SECONDS

    def _submit_held_back(self) -> None:
        if self._held_back and time.monotonic() > self._next_submit:
            trials, self._held_back = self._held_back, []
            self.submit(trials)

    def _request(self, spec: TrialSpec) -> Request:
        memory, minutes = self._memory_megabytes, self._minutes
        return request_for(spec, cpus=self._cpus, gpus=self._gpus, memory_megabytes=memory, minutes=minutes)

    def _submit_array(self, request: Request, trials: Sequence[Trial]) -> None:
        batch = uuid.uuid4().hex[:12]
        names, file = self._folder / f"{batch}.names", self._folder / f"{batch}.sh"
        names.write_text("".join(f"{trial.name} {attempt_of(self._sweep, trial.name)}\n" for trial in trials))
        command = [sys.executable, "-m", "flopwatch.sweep.supervisor", str(self._sweep)]
        file.write_text(
            script(
                self._job_name,
                request,
                names,
                len(trials),
                command,
                parallelism=self._parallelism,
                partition=self._partition,
                extra=self._extra,
            )
        )
        job = slurm_commands.submit(file, self._job_name)
        for index, trial in enumerate(trials):
            self._add(_Task(trial, f"{job}_{index}", _log(names, index)))

    def _add(self, task: _Task) -> None:
        self._tasks[task.trial.name] = task
        self._turn.append(task.trial.name)

    def wait(self, seconds: float) -> Sequence[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            ended = self._withdrawn()
            self._submit_held_back()
            ended = ended or self._finished() or self._vanished()
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, _TICK_SECONDS))

    def _withdrawn(self) -> list[Ended]:
        """Cancelled before Slurm took them."""
        trials, self._held_back = (self._held_back, []) if self._is_cancelled else ([], self._held_back)
        return [Ended(trial.name, {"state": "CANCELLED"}) for trial in trials]

    def _finished(self) -> list[Ended]:
        """Trials with a result. Files are looked at in turns: thousands at once would burden the file system."""
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
        """A supervisor that Slurm told to stop says `cancelled`; why it was told is for Slurm to say."""
        file = result_file(self._sweep, name)
        if not file.exists():
            return False
        return self._is_cancelled or read_object(file).get("outcome") != "cancelled"

    def _vanished(self) -> list[Ended]:
        """Trials without a result that Slurm no longer has."""
        now = time.monotonic()
        if now < self._next_squeue or not self._tasks:
            return []
        queue = slurm_commands.queue(self._job_name)
        took = time.monotonic() - now
        # A controller that is slow to answer is asked less often.
        self._next_squeue = now + max(_SQUEUE_EVERY_SECONDS, 20 * took)
        if queue is None:
            self._silent_since = self._silent_since or now
            return []
        self._silent_since = None
        gone = self._note(queue, now)
        if not gone:
            return []
        known = slurm_commands.accounted(task.task for task in gone)
        return [self._end(task.trial.name, evidence) for task in gone if (evidence := self._ending(task, known, now))]

    def _note(self, queue: Sequence[Queued], now: float) -> list[_Task]:
        there = {entry.task: entry for entry in queue}
        gone = []
        for task in self._tasks.values():
            entry = there.get(task.task)
            task.is_pending = entry is not None and entry.is_pending
            if entry is None:
                task.gone_since = task.gone_since or now
                gone.append(task)
        return gone

    def _ending(self, task: _Task, known: Mapping[str, Accounted], now: float) -> dict[str, Any] | None:
        """What to tell; None while a result may still come into sight, or while accounting lags behind."""
        found = known.get(task.task)
        is_patient = now - (task.gone_since or now) < _GIVE_UP_SECONDS
        name = task.trial.name
        # Our job found the trial taken and left; the job of an earlier runner that has it may take its time.
        is_elsewhere = found is not None and found.state == "COMPLETED"
        if (is_patient or is_elsewhere) and is_supervised(self._sweep, name):
            return None
        is_told = result_file(self._sweep, name).exists()
        if is_patient and (found is None or not found.is_over or (found.state == "COMPLETED" and not is_told)):
            return None
        return _evidence(task, found)

    def _end(self, name: str, evidence: Mapping[str, Any]) -> Ended:
        task = self._tasks.pop(name)
        return Ended(name, {"job": task.task, **evidence})

    def end(self, names: Sequence[str]) -> None:
        """Slurm sends SIGTERM, and SIGKILL to everything of the job after its KillWait."""
        slurm_commands.cancel(self._tasks[name].task for name in names if name in self._tasks)

    def cancel(self) -> None:
        self._is_cancelled = True
        slurm_commands.cancel(task.task for task in self._tasks.values())

    def close(self) -> None:
        """Nothing is held."""

    def state(self) -> str:
        if self._silent_since is not None:
            return f"Slurm has not answered for {time.monotonic() - self._silent_since:.0f} s"
        pending = sum(task.is_pending for task in self._tasks.values())
        held_back = (
            f", {len(self._held_back)} held back: Slurm takes no more jobs of this user" if self._held_back else ""
        )
        return f"{len(self._tasks) - pending} running, {pending} queued{held_back}"


def _evidence(task: _Task, found: Accounted | None) -> dict[str, Any]:
    evidence: dict[str, Any] = {"job": task.task, "state": found.state if found else "UNKNOWN"}
    if found is not None:
        facts = {"exit_code": found.exit_code, "signal": found.signal, "host": found.node}
        facts |= {"max_rss_bytes": found.max_rss_bytes, "elapsed_seconds": found.elapsed_seconds}
        evidence |= {key: value for key, value in facts.items() if value is not None}
    if printed := _tail(task.log):
        evidence["log"] = printed
    return evidence


def _line(file: Path, index: int) -> tuple[str, str]:
    """A trial and its attempt; empty where the file says nothing."""
    try:
        with opened_regular(file) as names:
            line = names.read().decode(errors="replace").splitlines()[index]
    except (FileNotFoundError, UnreadableError, IndexError):
        return "", ""
    name, _, attempt = line.rpartition(" ")
    return name, attempt


def _log(names: Path, index: int) -> Path:
    return names.with_name(f"{names.stem}-{index}.log")


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
