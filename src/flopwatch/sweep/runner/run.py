"""Runs the trials of a plan on an engine. Results are written at once and not kept: 10,000 trials need no memory."""

import contextlib
import errno
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.records.reading import read_json, read_object, tail
from flopwatch.records.trial import UNSETTLED, TrialResult
from flopwatch.records.trial_files import GUARD, STARTED, SWEEP, log_file, trial_folder
from flopwatch.sweep.attempts import attempt_from, listed_attempts, put_aside
from flopwatch.sweep.claims import BEAT_SECONDS, is_alive_here, is_withdrawn, visible_seconds, withdraw
from flopwatch.sweep.engines.protocol import Ended, Engine, ending_from_evidence, outcome_known_to_engine
from flopwatch.sweep.folder import (
    Trial,
    attempt_of,
    folder_of,
    has_begun,
    is_supervised,
    own_result,
    prepare,
    record,
    restore_lists,
    silent_seconds,
)
from flopwatch.sweep.host.processes import kill_marked
from flopwatch.sweep.runner.observing import Observer, SafeObserver, Stop
from flopwatch.sweep.runner.plan import (
    DEFAULT_POLICY,
    Plan,
    RetryPolicy,
    hosts_to_avoid,
    inferred_result,
    proves_too_large,
)
from flopwatch.sweep.supervisor.build_result import with_finished_steps
from flopwatch.sweep.supervisor.supervise import allowed_silence

# What a runner waits for before it decides: results of other hosts, silent supervisors, a full disk.
#
# When an engine reports that a supervisor is gone, the trial's result may become visible later, because a file system
# may show the files of another host only after a minute. A trial is called lost only after that time, and not while its
# supervisor still shows signs of life.


class LateResults:
    """Holds ended trials back until their results are visible, or can no longer appear.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[str, Ended] = {}
        self._deadlines: dict[str, float] = {}

    def ready(self, ended: Iterable[Ended], running: Mapping[str, Trial], *, is_patient: bool = True) -> list[Ended]:
        """The ended trials, of these and of those held back, that can be settled now.

        Args:
            ended: New from the engine.
            running: The trials, by name; others are dropped.
            is_patient: False returns all of them, for a sweep that is being cancelled.
        """
        for end in ended:
            if end.name in running:
                self._ended.setdefault(end.name, end)
        ready = [name for name in self._ended if not is_patient or self.is_over(running[name])]
        return [_with_guards_reason(self._ended.pop(name), running[name]) for name in ready]

    def is_over(self, trial: Trial) -> bool:
        """True when the trial's result is visible, or when no supervisor runs it and no result can appear any more."""
        is_over = self._is_over(trial)
        if is_over:
            self._deadlines.pop(trial.name, None)
        return is_over

    def _is_over(self, trial: Trial) -> bool:
        deadline = self._deadlines.setdefault(trial.name, self._clock() + visible_seconds())
        if own_result(trial.sweep, trial.name) is not None:
            return True
        if is_supervised(trial.sweep, trial.name):
            return False
        return self._clock() > deadline or not _may_have_begun_elsewhere(trial_folder(trial.sweep, trial.name))


def _may_have_begun_elsewhere(folder: Path) -> bool:
    """True when a supervisor on another host has begun this trial, or may have."""
    claimed = read_json(folder / STARTED)
    if not isinstance(claimed, dict):
        return not withdraw(folder)  # after this no supervisor can begin it; it fails if one has
    return not is_withdrawn(claimed) and is_alive_here(claimed) is None


def _with_guards_reason(ended: Ended, trial: Trial) -> Ended:
    """Add the note of a guard that killed its supervisor because it did not respond."""
    note = read_json(trial_folder(trial.sweep, trial.name) / GUARD)
    if isinstance(note, dict) and note.get("attempt") == attempt_of(trial.sweep, trial.name):
        return replace(ended, evidence={"stuck": note.get("reason"), **ended.evidence})
    return ended


class SilentSupervisors:
    """Ends supervisors that are alive but stuck: stopped, or blocked by a file system that hangs.

    The guard on the supervisor's own host kills it first (`trial_guard.py`). What is found here has lost its guard, or
    its host does not respond.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_check = 0.0
        self._reasons: dict[str, str] = {}

    def end_silent(self, engine: Engine, running: Mapping[str, Trial]) -> None:
        """Have the engine kill each one that was silent for longer than its trial's limits and visibility allow."""
        end = getattr(engine, "end", None)
        if end is None or self._clock() < self._next_check:
            return
        self._next_check = self._clock() + BEAT_SECONDS
        found = {name: reason for name, trial in running.items() if (reason := self._reason(trial))}
        if found:
            self._reasons |= found
            end(list(found))

    def _reason(self, trial: Trial) -> str | None:
        if trial.name in self._reasons:
            return None
        claimed = read_json(trial_folder(trial.sweep, trial.name) / STARTED)
        if not isinstance(claimed, dict) or is_withdrawn(claimed):
            return None
        silent = silent_seconds(trial.sweep, trial.name)
        if silent <= allowed_silence(trial.spec.limits) + visible_seconds():
            return None
        process = f"pid {claimed.get('pid')} on {claimed.get('host')}"
        return f"its supervisor ({process}) showed no sign of life for {silent:.0f} s and was ended"

    def explain(self, ended: Ended) -> Ended:
        """Add why the supervisor was ended, if we ended it."""
        reason = self._reasons.pop(ended.name, None)
        return ended if reason is None else replace(ended, evidence={"stuck": reason, **ended.evidence})


_TRANSIENT = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.ESTALE,
        errno.EIO,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EMFILE,
        errno.ENFILE,
        errno.EREMOTEIO,
    )
)

_PAUSE_SECONDS = 5.0  # between two tries on a full disk


def is_transient(error: OSError) -> bool:
    """Whether the error may go away, such as a full disk; a sweep of a week waits for that."""
    return error.errno in _TRANSIENT


class Pause:
    """A pause between two tries of something that failed for now.

    Args:
        seconds: Between two tries.
        clock: Monotonic seconds.

    Attributes:
        why: The reason, for a user; empty when there is no pause.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = _PAUSE_SECONDS if seconds is None else seconds, clock
        self._until = 0.0
        self.why = ""

    def begin(self, error: OSError) -> None:
        self.why = f"waiting: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        self._until = self._clock() + self._seconds

    def is_over(self) -> bool:
        return not self.why or self._clock() >= self._until

    def end(self) -> None:
        self.why = ""


class ResultWriter:
    """Appends results to the sweep's list, and retries what failed. The trials' own folders have them already.

    Args:
        write: Writes one result.
    """

    def __init__(self, write: Callable[[TrialResult], None]) -> None:
        self._write = write
        self._waiting: deque[TrialResult] = deque()
        self.pause = Pause()

    def add(self, result: TrialResult) -> None:
        self._waiting.append(result)
        self.catch_up()

    def catch_up(self) -> None:
        """Write the queued results, in order."""
        while self._waiting and self.pause.is_over():
            try:
                self._write(self._waiting[0])
            except OSError as error:
                if not is_transient(error):
                    raise
                self.pause.begin(error)
                return
            self._waiting.popleft()
            self.pause.end()

    def close(self, patience_seconds: float = 60.0) -> int:
        """Write what is still queued; returns how many results could not be written."""
        deadline = time.monotonic() + patience_seconds
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.05)
            self.catch_up()
        return len(self._waiting)


_TICK_SECONDS = 0.25  # how long an engine may wait for an end; also how soon Ctrl-C has an effect
_IDLE_TICK_SECONDS = 0.05  # when nothing runs, only trials of other runners are waited for
_ONE_FOLDERS_ERRORS = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
"""Errors that concern the folder of one trial, so that the other trials can still run."""

_LATEST_UNIX_TIME = 1e11  # some thousand years ahead; anything beyond is a damaged file

Refusal = Callable[[Trial], str | None]


def run_plan(
    plan: Plan,
    engine: Engine,
    observer: Observer,
    stop: Stop,
    refuse: Refusal = lambda trial: None,
    *,
    retries: RetryPolicy = DEFAULT_POLICY,
    budget_seconds: float | None = None,
    clock: Clock = monotonic_seconds,
) -> dict[str, int]:
    """Run the plan's trials; every result is appended to `results.jsonl` at once. Returns the number of each outcome.

    Args:
        plan: From `make_plan`.
        engine: Where trials are placed.
        observer: Called for what happens; an exception it raises does not end the sweep.
        stop: Read several times a second.
        refuse: Returns why a trial cannot run at all (its preflight failed), before it takes a slot.
        retries: Which outcomes are followed by another attempt, and how often.
        budget_seconds: After this time no trial is started; None is no limit.
        clock: Measures the budget.
    """
    run = _Run(plan, engine, SafeObserver(observer), stop, refuse, retries)
    began = clock()
    run.adopt_earlier_trials()
    try:
        while run.is_active():
            stop.is_over_budget = budget_seconds is not None and clock() - began >= budget_seconds
            run.tick()
    finally:
        run.close()
    return run.counts


@dataclass
class _Run:
    """The state of one run of a plan.

    Attributes:
        waiting: Trials that are not placed yet, in order.
        running: Trials that the engine runs, by name.
        elsewhere: Trials that an earlier runner started, unknown to the engine, whose supervisors may be alive.
        out_of_memory: Results that prove larger trials too large.
        counts: Results so far, by outcome.
    """

    plan: Plan
    engine: Engine
    observer: SafeObserver
    stop: Stop
    refuse: Refusal
    retries: RetryPolicy
    waiting: deque[Trial] = field(default_factory=deque)
    running: dict[str, Trial] = field(default_factory=dict)
    elsewhere: dict[str, Trial] = field(default_factory=dict)
    out_of_memory: list[TrialResult] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    is_cancelled: bool = False
    pause: Pause = field(default_factory=Pause)
    late: LateResults = field(default_factory=LateResults)
    silent: SilentSupervisors = field(default_factory=SilentSupervisors)

    def __post_init__(self) -> None:
        self.writer = ResultWriter(self._write)
        self.out_of_memory += [result for result in self.plan.kept.values() if proves_too_large(result)]

    @property
    def sweep(self) -> Path:
        return self.plan.trials[0].sweep

    def is_active(self) -> bool:
        may_start_more = bool(self.waiting or self.elsewhere) and not self.stop.is_finishing
        return bool(self.running) or may_start_more

    def adopt_earlier_trials(self) -> None:
        """Wait for trials that an earlier runner started and the engine still runs, instead of starting them again."""
        begun = [self._with_attempts(trial) for trial in self.plan.todo if folder_of(trial).exists()]
        adopted = set(self.engine.open(self.sweep, begun))
        self.running = {trial.name: trial for trial in begun if trial.name in adopted}
        self.elsewhere = {trial.name: trial for trial in begun if trial.name not in adopted}
        begun_names = adopted | set(self.elsewhere)
        self.waiting = deque(trial for trial in self.plan.todo if trial.name not in begun_names)
        self._reclaim_ended()

    def _with_attempts(self, trial: Trial) -> Trial:
        """With the attempts of a killed runner, unless the user asked for a finished trial again: that starts anew."""
        if trial.name in self.plan.again:
            return trial
        attempts = listed_attempts(trial.sweep, trial.name, trial.key)
        return replace(trial, earlier_attempts=attempts, avoid=hosts_to_avoid(attempts)) if attempts else trial

    def tick(self) -> None:
        if self.stop.is_finishing:
            self._wind_down()
        else:
            self._submit_waiting()
        self._reclaim_ended()
        self.silent.end_silent(self.engine, self.running)
        ended = self.engine.wait(_TICK_SECONDS if self.running else _IDLE_TICK_SECONDS)
        for end in self.late.ready(ended, self.running, is_patient=not self.is_cancelled):
            self._finish(self.silent.explain(end))
        self.writer.catch_up()
        problem = self.pause.why or self.writer.pause.why
        self.observer.ticked(self.running, len(self.waiting), problem or self.engine.state())

    def close(self) -> None:
        if self.running:
            self.engine.cancel()
        self.engine.close()
        if unwritten := self.writer.close():
            sys.stderr.write(f"flopwatch: {unwritten} results could not be listed; {self.writer.pause.why}\n")

    def _write(self, result: TrialResult) -> None:
        if not (self.sweep / SWEEP).exists():  # a trial may delete the sweep's folder
            restore_lists(self.sweep, self.plan.trials, self.plan.kept.values(), self.engine.name)
        record(self.sweep, result)

    def _settle(self, result: TrialResult) -> None:
        self.writer.add(result)
        self.counts[result.outcome] = self.counts.get(result.outcome, 0) + 1
        self.observer.ended(result)

    def _reclaim_ended(self) -> None:
        """Settle or queue the trials of an earlier runner whose supervisors are gone."""
        ended = [trial for trial in self.elsewhere.values() if self.late.is_over(trial)]
        for trial in ended:
            del self.elsewhere[trial.name]
            result = own_result(trial.sweep, trial.name) if trial.name not in self.plan.again else None
            if result is not None and result.key == trial.key and result.outcome not in UNSETTLED:
                self._settle(result)
            else:
                self.waiting.append(trial)
        if ended:
            order = {trial.name: place for place, trial in enumerate(self.plan.todo)}
            self.waiting = deque(sorted(self.waiting, key=lambda trial: order[trial.name]))

    def _wind_down(self) -> None:
        """Start nothing: take back what the engine has queued and, on `stop.kill`, end what runs."""
        withdraw = getattr(self.engine, "withdraw", None)  # optional in the engine protocol
        for name in withdraw() if withdraw is not None else ():
            if (trial := self.running.pop(name, None)) is not None:
                self.waiting.append(trial)
        if self.stop.kill and not self.is_cancelled:
            self.is_cancelled = True
            self.engine.cancel()

    def _submit_waiting(self) -> None:
        """Give the engine as many trials as it has room for; trials that need not run are settled on the way."""
        while self.waiting and self.pause.is_over() and (room := self.engine.room(self.waiting[0].spec)) > 0:
            batch = self._next_batch(room)
            if not batch:
                return
            self.engine.submit(batch)
            for trial in batch:
                self.running[trial.name] = trial
                self.observer.started(trial)

    def _next_batch(self, room: int) -> list[Trial]:
        batch: list[Trial] = []
        while self.waiting and len(batch) < room:
            trial = self.waiting.popleft()
            settled = _refused(trial, self.refuse) or inferred_result(trial, self.out_of_memory)
            if settled is not None:
                self._settle(settled)
                continue
            trial = replace(trial, retries=self.retries.most)
            try:
                prepare(trial)
            except OSError as error:
                if is_transient(error):  # such as a full disk: this trial is the first to be tried again
                    self.waiting.appendleft(trial)
                    self.pause.begin(error)
                    break
                if not isinstance(error, _ONE_FOLDERS_ERRORS):
                    raise
                self._settle(_result_without_folder(trial, error))
                continue
            self.pause.end()
            batch.append(trial)
        return batch

    def _finish(self, ended: Ended) -> None:
        """Settle a trial whose supervisor is gone, or queue its next attempt."""
        trial = self.running.pop(ended.name, None)
        if trial is None:
            return
        result = _result_of(trial, ended, is_cancelled=self.is_cancelled)
        earlier = len(result.earlier_attempts)
        if self.retries.tries_again(result, earlier, is_stopping=self.stop.is_finishing):
            self.waiting.append(_next_attempt(trial, result))
            self.observer.tries_again(result, earlier + 1, self.retries.most)
            return
        if proves_too_large(result):
            self.out_of_memory.append(result)
        self._settle(result)


def _result_without_folder(trial: Trial, error: OSError) -> TrialResult:
    reason = f"could not be started: {error.strerror}: {error.filename}; make it readable and writable, or remove it"
    return TrialResult(trial.name, trial.key, trial.spec, "lost", reason, {"from": "the sweep's folder"})


def _refused(trial: Trial, refuse: Refusal) -> TrialResult | None:
    reason = refuse(trial)
    if reason is None:
        return None
    return TrialResult(trial.name, trial.key, trial.spec, "unsupported", reason, {"from": "preflight"})


def _result_of(trial: Trial, ended: Ended, *, is_cancelled: bool) -> TrialResult:
    """The supervisor's result, with what only the engine knows, such as that Slurm preempted the job."""
    result = own_result(trial.sweep, trial.name) or _result_without_supervisor(trial, ended.evidence)
    if result.outcome == "cancelled" and not is_cancelled and (better := outcome_known_to_engine(ended.evidence)):
        evidence = {**result.evidence, **ended.evidence}
        result = replace(result, outcome=better[0], reason=better[1], evidence=evidence)
    result = with_finished_steps(result, folder_of(trial))
    return replace(result, earlier_attempts=result.earlier_attempts or trial.earlier_attempts)


def _next_attempt(trial: Trial, result: TrialResult) -> Trial:
    """The trial again. It is queued last: by the time it runs, the engine may know that a node has failed."""
    folder = put_aside(trial.sweep, trial.name) if has_begun(trial.sweep, trial.name) else None
    attempts = (*result.earlier_attempts, attempt_from(result, folder))
    trial = replace(trial, earlier_attempts=attempts, avoid=hosts_to_avoid(attempts))
    with contextlib.suppress(OSError):  # `_next_batch` prepares it again
        prepare(trial)  # at once, so that the attempt is on disk if this runner is killed now
    return trial


def _result_without_supervisor(trial: Trial, evidence: Mapping[str, Any]) -> TrialResult:
    """The supervisor is gone and wrote no result. Kills processes of the trial that may have outlived it."""
    kill_marked(folder_of(trial).resolve())
    outcome, reason = ending_from_evidence(evidence)
    began = read_object(folder_of(trial) / STARTED).get("unix_time")
    return TrialResult(
        trial.name,
        trial.key,
        trial.spec,
        outcome,
        reason,
        dict(evidence),
        unix_time=began if isinstance(began, int | float) and 0 < began < _LATEST_UNIX_TIME else None,
        log_tail=tail(log_file(trial.sweep, trial.name)),
        earlier_attempts=listed_attempts(trial.sweep, trial.name, trial.key),
    )
