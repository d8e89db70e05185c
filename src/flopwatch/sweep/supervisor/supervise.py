"""Runs one trial and writes its result: `python -m flopwatch.sweep.supervisor SWEEP_FOLDER NAME [ATTEMPT]`.

The supervisor first claims the trial with an exclusive file, so that no other supervisor runs it too. It starts the
worker process, checks the worker's heartbeat and memory, and kills the worker if it exceeds a limit. At the end it
kills all remaining processes of the trial, determines the outcome and writes the result. Standard library only, so that
the supervisor starts quickly and leaves the memory to the trial.

With ATTEMPT, the supervisor exits if the trial's files belong to another attempt.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from flopwatch.decode import BrokenRecordError
from flopwatch.files import UnreadableError, load_json, read_object, write_json
from flopwatch.process import descendants
from flopwatch.records.sweep_results import NewerFormatError, read_current
from flopwatch.records.trial import AFTER_THE_STEPS, Limits, TrialJob, TrialResult, TrialSpec
from flopwatch.records.trial_files import EXCEPTION, RESULT, SPEC, STACKS, STARTED, log_file, of_rank, trial_folder
from flopwatch.sweep.claim import Claim, trial_claim, visible_seconds
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.host.memory import HostPeak, TreeMemory, limit_memory, own_oom_kills, resident
from flopwatch.sweep.host.trial_log import TrialLog
from flopwatch.sweep.progress import Progress, read_progress, when_there_is_space
from flopwatch.sweep.supervisor.build_result import WorkerExit, build_result, with_full_disk
from flopwatch.sweep.supervisor.classify import ExitFacts, OwnKill, signal_name
from flopwatch.sweep.supervisor.guard import become_guarded, clear_attempts, group_name
from flopwatch.sweep.supervisor.ranks import JobEnd, job_end

_TICK_SECONDS = 0.2  # The memory must be sampled several times a second to enforce a limit.
_SPEC_TICK_SECONDS = 0.25  # This is the time between two tries to read a `spec.json` that is not visible yet.

_SUPERSEDED = "the runner gave the trial to another supervisor, because this one had shown no sign of life"
_SLURM_SIGNAL_SECONDS = 0.5  # The supervisor waits this long for Slurm's SIGTERM after its worker has failed.
_SLURM_SUCCESS_SECONDS = 0.05  # The supervisor waits this long for SIGTERM if its worker has exited with code 0.


class AlreadyStartedError(Exception):
    """The trial was started before, and must not run twice."""


class UnusableSpecError(Exception):
    """The trial's `spec.json` is missing or cannot be read."""


def main(arguments: list[str], errors: TextIO = sys.stderr) -> int:
    sweep, name = Path(arguments[0]), arguments[1]
    attempt = arguments[2] if len(arguments) > 2 else None
    if not process_tree.ends_with_parent(signal.SIGTERM):
        return 1
    become_guarded(trial_folder(sweep.resolve(), name))
    parent = os.getppid()
    stop: list[str] = []

    def note(number: int, frame: object) -> None:
        why = "its runner or its job ended" if os.getppid() == parent else "its parent process was killed"
        stop.append(f"the supervisor received {signal_name(number)}, because {why}")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    if (cores := os.environ.get(process_tree.CORES)) and hasattr(os, "sched_setaffinity"):  # macOS does not have it
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        supervise(sweep, name, cancel=lambda: stop[0] if stop else None, attempt=attempt)
    except (AlreadyStartedError, UnusableSpecError) as error:
        errors.write(f"flopwatch: {error}; nothing was run\n")
        return int(isinstance(error, UnusableSpecError))
    return 0


@dataclass(frozen=True, slots=True)
class _Supervised:
    """The trial that a supervisor runs. `cancel` returns the reason to stop the trial, or None to continue."""

    sweep: Path
    name: str
    job: TrialJob
    cancel: Callable[[], str | None]
    claim: Claim

    @property
    def folder(self) -> Path:
        return trial_folder(self.sweep, self.name)

    @property
    def spec(self) -> TrialSpec:
        return self.job.spec

    def wait_for_space(self, why: str) -> None:
        """Show that this supervisor is alive while it waits for space on a full disk."""
        if not self.claim.beat():
            raise AlreadyStartedError(f"another supervisor runs this trial now, according to {self.claim.file}")


def supervise(
    sweep: Path,
    name: str,
    cancel: Callable[[], str | None] = lambda: None,
    attempt: str | None = None,
) -> TrialResult:
    """Run one trial, write its result to `trials/NAME/result.json` and return it.

    Call it in a process without other children, because it kills all child processes at the end. `cancel` returns the
    reason to stop the trial, or None; it is called several times a second. `attempt` is the one that `spec.json` must
    belong to; None accepts any.

    Raises AlreadyStartedError if the trial was started before, or another supervisor runs it, and UnusableSpecError if
    its `spec.json` is missing or cannot be read.
    """
    sweep = sweep.resolve()
    folder = trial_folder(sweep, name)
    job = _wait_for_job(folder, attempt)
    process_tree.adopt_orphans()
    _claim(folder, job.attempt, cancel)
    trial = _Supervised(sweep, name, job, cancel, trial_claim(folder))
    clear_attempts(folder)
    os.environ[process_tree.ATTEMPT_MARK] = job.attempt  # all processes of the trial inherit this variable
    log = when_there_is_space(lambda: TrialLog(log_file(sweep, name)), trial.wait_for_space)
    try:
        worker_exit = _run_worker(trial, log)
    finally:
        log.close(trial.wait_for_space)
    result = with_full_disk(build_result(sweep, name, job, worker_exit), log.full_disk)
    if trial.claim.owner() == "another":
        raise AlreadyStartedError(f"another supervisor runs this trial now, according to {trial.claim.file}")

    def wait(why: str) -> None:
        nonlocal result
        result = with_full_disk(result, why)
        trial.wait_for_space(why)

    when_there_is_space(lambda: write_json(folder / RESULT, result.to_json()), wait)
    return result


def _wait_for_job(folder: Path, attempt: str | None) -> TrialJob:
    """Read `spec.json`. Wait for the file first, because it may become visible on this host with a delay."""
    deadline = time.monotonic() + visible_seconds()
    while True:
        with contextlib.suppress(FileNotFoundError):
            job = _read_job(folder)
            if attempt in (None, job.attempt):
                return job
        claimed = read_object(folder / STARTED)
        is_other_attempt = bool(claimed) and attempt is not None and claimed.get("attempt") != attempt
        if is_other_attempt or time.monotonic() > deadline:
            break
        time.sleep(_SPEC_TICK_SECONDS)
    if (folder / SPEC).exists():
        raise AlreadyStartedError(
            f"{folder / SPEC} does not belong to attempt {attempt}, because the trial was queued again"
        )
    raise UnusableSpecError(f"{folder / SPEC} does not exist on this host; use a folder that all hosts share")


def _read_job(folder: Path) -> TrialJob:
    try:
        return read_current(TrialJob, load_json(folder / SPEC))
    except (UnreadableError, BrokenRecordError) as error:
        raise UnusableSpecError(f"{folder / SPEC} is damaged: {error}") from None
    except NewerFormatError as error:
        reason = f"{folder / SPEC} cannot be read on this node, because {error}"
        raise UnusableSpecError(reason) from None


def _claim(folder: Path, attempt: str, cancel: Callable[[], str | None]) -> None:
    """Create the file that claims the trial."""

    def give_up_if_cancelled(why: str) -> None:
        if stopped := cancel():
            raise AlreadyStartedError(f"{stopped}, while it waited to start the trial ({why})")

    claim = trial_claim(folder)
    if not when_there_is_space(lambda: claim.take(attempt=attempt), give_up_if_cancelled):
        raise AlreadyStartedError(f"this trial was already started: {folder / STARTED} exists")
    if read_object(folder / SPEC).get("attempt") != attempt:
        claim.release()
        raise AlreadyStartedError(f"{folder / SPEC} does not belong to attempt {attempt} any more")


def _run_worker(trial: _Supervised, log: TrialLog) -> WorkerExit:
    # The duration is measured with the monotonic clock, because the system clock may jump.
    unix_time, began, kills_before = time.time(), time.monotonic(), own_oom_kills()
    spec = trial.spec
    limit = limit_memory(spec.limits.memory_bytes, group_name(trial.folder, trial.job.attempt))
    try:
        worker = process_tree.start_worker(trial.folder, trial.job, limit, log.handle)
        log.start()
        watch = _watch(trial, worker, log)
        end = job_end(trial.folder, spec.processes) if spec.runs_torchrun else JobEnd()
        if end.first is not None and end.first.exception is not None:
            first = end.first.exception
            when_there_is_space(lambda: write_json(trial.folder / EXCEPTION, first), trial.wait_for_space)
        seconds = time.monotonic() - began
        unkillable_pids = process_tree.kill_descendants(os.getpid())
        life_peak = _life_peak(watch.memory)
        facts = ExitFacts(
            own_kill=watch.own_kill,
            own_kill_detail=watch.detail,
            status=worker.poll(),
            oom_kills=limit.oom_kills() if limit.kind == "cgroup" else own_oom_kills() - kills_before,
            has_own_group=limit.kind == "cgroup",
            held_bytes=watch.memory.lower_bound_bytes,
            limit_bytes=spec.limits.memory_bytes,
        )
        return WorkerExit(
            pid=worker.pid,
            facts=facts,
            stacks=watch.stacks,
            # A command does not report its steps, so its peak is that of its whole run.
            host_peak=life_peak if spec.trainer == "command" else watch.steps_peak,
            memory_limit=limit.facts(life_peak),
            unkillable_pids=unkillable_pids,
            unix_time=unix_time,
            seconds=seconds,
            job_end=end,
        )
    finally:
        limit.close()


def _life_peak(memory: TreeMemory) -> HostPeak:
    """Return the peak host memory of the whole trial, including processes that ended between two samples.

    The kernel reports the largest peak of all ended children. A forked child starts with the memory of this process, so
    the kernel's number is used only if it exceeds the peak of this process.
    """
    import resource  # Windows has no such module; `check_system` says so before a trial starts

    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    own = resident("self")
    if own is None or largest > own.peak:
        memory.note_ended(largest)
    return memory.peak


@dataclass
class _Watch:
    """What the supervisor measures while the worker runs, and the reason if it must kill the worker."""

    memory: TreeMemory
    is_command: bool = False
    own_kill: OwnKill | None = None
    detail: str = ""
    stacks: str = ""
    steps_peak: HostPeak = field(default_factory=HostPeak)
    progress: Progress = field(default_factory=Progress)
    began: float = field(default_factory=time.monotonic)
    progressed: float = field(default_factory=time.monotonic)
    sampled: float = field(default_factory=time.monotonic)

    def note(self, latest: Progress) -> None:
        # Memory was sampled before the phase was read, so the sample is from this phase or an earlier one.
        if latest.phase not in AFTER_THE_STEPS:
            self.steps_peak = self.memory.peak
        before, self.sampled = self.sampled, time.monotonic()
        if latest.waits:  # for space on a full disk
            self.began += self.sampled - before
        if latest != self.progress or latest.waits:
            self.progress, self.progressed = latest, self.sampled

    def check_limits(self, limits: Limits) -> None:
        now, where = time.monotonic(), "" if self.is_command else f", in {self.progress.text}"
        if held := self.memory.over_limit_bytes():
            most = (limits.memory_bytes or 0) / 2**20
            held_text = f"its processes used {held / 2**20:,.0f} MiB together; the limit is {most:,.0f} MiB"
            self.own_kill, self.detail = "oom_host", f"{held_text}{where}"
        elif limits.wall_seconds is not None and now - self.began > limits.wall_seconds:
            self.own_kill = "timeout"
            self.detail = f"not done after {limits.wall_seconds:g} s{where}"
        elif limits.no_progress_seconds is not None and now - self.progressed > limits.no_progress_seconds:
            self.own_kill = "hang"
            what = "output" if self.is_command else "progress"
            self.detail = f"no {what} for {now - self.progressed:.0f} s{where}"


def _watch(trial: _Supervised, worker: "subprocess.Popen[bytes]", log: TrialLog) -> _Watch:
    is_command = trial.spec.trainer == "command"
    watch = _Watch(TreeMemory(trial.spec.limits.memory_bytes), is_command)
    while not process_tree.ends_within(worker, _TICK_SECONDS):
        is_ours = trial.claim.beat()
        watch.memory.sample()
        # A command writes no heartbeat. Its progress is the number of printed bytes.
        watch.note(Progress("run", log.received_bytes) if is_command else read_progress(trial.folder))
        if why := trial.cancel() or ("" if is_ours else _SUPERSEDED):
            watch.own_kill, watch.detail = "cancelled", why
        else:
            watch.check_limits(trial.spec.limits)
        if watch.own_kill is not None:
            _kill_worker(trial, worker, watch)
            return watch
    _wait_for_cancellation(worker, watch, trial.cancel)
    return watch


def _kill_worker(trial: _Supervised, worker: "subprocess.Popen[bytes]", watch: _Watch) -> None:
    # Kill a trial over its memory limit at once, without SIGTERM and without its stacks, before it allocates even more.
    sigterm_first = trial.spec.trainer == "command" and watch.own_kill != "oom_host"
    if watch.own_kill in ("timeout", "hang") and not watch.is_command:
        watch.stacks = _stacks(trial, worker)
    process_tree.end_worker(worker, sigterm_first=sigterm_first)


def _stacks(trial: _Supervised, worker: "subprocess.Popen[bytes]") -> str:
    pids = descendants(os.getpid()) if trial.spec.runs_torchrun else [worker.pid]
    ranks = range(trial.spec.processes if trial.spec.runs_torchrun else 1)
    texts = process_tree.python_stacks(pids, [trial.folder / of_rank(STACKS, rank) for rank in ranks])
    parts = [f"rank {rank}:\n{text}" if len(ranks) > 1 else text for rank, text in enumerate(texts) if text]
    return "\n".join(parts) or "none: no process of the trial has its signal handler yet, or they block signals"


def _wait_for_cancellation(worker: "subprocess.Popen[bytes]", watch: _Watch, cancel: Callable[[], str | None]) -> None:
    """Wait briefly for a signal to the supervisor that explains why the worker ended.

    Slurm sends SIGTERM to all processes of a job at once, and the worker may end before the supervisor's handler has
    run. The worker may end with any exit code: a trainer may save a checkpoint and exit with 0, for example.
    """
    if "SLURM_JOB_ID" not in os.environ and worker.returncode not in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return
    deadline = time.monotonic() + (_SLURM_SUCCESS_SECONDS if worker.returncode == 0 else _SLURM_SIGNAL_SECONDS)
    while time.monotonic() < deadline:
        if why := cancel():
            watch.own_kill, watch.detail = "cancelled", why
            return
        time.sleep(0.01)
