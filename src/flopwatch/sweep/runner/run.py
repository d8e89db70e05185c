"""Runs the trials of a plan on an engine and writes each result to `results.jsonl` when its trial has ended.

Trials that differ only in their batch, length or seed are of one kind. The smallest trial of each kind runs first, and
the others wait for its end. If it cannot run at all, they are `skipped` with its reason.
"""

import contextlib
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.records.trial import UNSETTLED, Outcome, TrialResult
from flopwatch.records.trial_files import RESULTS
from flopwatch.sweep.claim import BEAT_SECONDS, trial_claim
from flopwatch.sweep.engines.protocol import Ended, Engine
from flopwatch.sweep.folder import (
    StillRunsError,
    Trial,
    attempt_from,
    check_held,
    has_begun,
    listed_attempts,
    own_result,
    prepare,
    put_aside,
    record,
)
from flopwatch.sweep.runner.endings import TRANSIENT, Endings, result_of
from flopwatch.sweep.runner.observing import Observer, SafeObserver, Stop
from flopwatch.sweep.runner.plan import (
    DEFAULT_POLICY,
    Plan,
    RetryPolicy,
    cannot_run,
    inferred_result,
    kind_of,
    proves_too_large,
    smallest_of_each_kind,
)

_PAUSE_SECONDS = 5.0  # time between two tries to write to a full disk
_CLOSE_SECONDS = 60.0  # how long to try to write the last results
_TICK_SECONDS = 0.25  # A call of `Engine.wait` takes at most this long, and so does the reaction to Ctrl-C.
_IDLE_TICK_SECONDS = 0.05  # This is the limit of `Engine.wait` while the engine runs no trial.


def run_plan(
    plan: Plan,
    engine: Engine,
    observer: Observer | SafeObserver | None,
    stop: Stop,
    *,
    retries: RetryPolicy = DEFAULT_POLICY,
    budget_seconds: float | None = None,
    clock: Clock = monotonic_seconds,
) -> dict[str, int]:
    """Run the trials `plan.todo` and append each result to `results.jsonl`; return how many trials ended, by outcome.

    An exception of the observer does not end the sweep. Another thread or a signal handler can set flags of `stop`.
    No trial starts after `budget_seconds`.
    """
    safe = observer if isinstance(observer, SafeObserver) else SafeObserver(observer)
    run = _Run(plan, engine, safe, stop, retries)
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
    """The state of one run of a plan."""

    plan: Plan
    engine: Engine
    observer: SafeObserver
    stop: Stop
    retries: RetryPolicy
    waiting: deque[Trial] = field(default_factory=deque)  # in the order in which they start
    running: dict[str, Trial] = field(default_factory=dict)
    elsewhere: dict[str, Trial] = field(default_factory=dict)  # of an earlier runner; the engine does not know them
    out_of_memory: list[TrialResult] = field(default_factory=list)  # these prove that larger trials would be too
    held: dict[str, list[Trial]] = field(default_factory=dict)  # by kind: they wait for its smallest trial
    impossible: dict[str, TrialResult] = field(default_factory=dict)  # by kind, of a smallest trial that cannot run
    unwritten: deque[TrialResult] = field(default_factory=deque)  # while the disk is full
    counts: Counter[str] = field(default_factory=Counter)
    false_starts: Counter[str] = field(default_factory=Counter)  # supervisors that never began, which cost no retry
    is_cancelled: bool = False
    next_check: float = 0.0
    waits_for: str = ""  # why nothing can be written until `next_try`
    next_try: float = 0.0
    endings: Endings = field(default_factory=Endings)

    @property
    def sweep(self) -> Path:
        return self.plan.trials[0].sweep

    def is_active(self) -> bool:
        may_start_more = bool(self.waiting or self.elsewhere) and not self.stop.is_finishing
        return bool(self.running) or may_start_more

    def adopt_earlier_trials(self) -> None:
        """Wait for trials that an earlier runner started and the engine still runs, instead of starting them again."""
        self.out_of_memory = [result for result in self.plan.kept.values() if proves_too_large(result)]
        begun = {trial.name: self._with_attempts(trial) for trial in self.plan.todo if trial.folder.exists()}
        adopted = set(self.engine.open(self.sweep, list(begun.values())))
        self.running = {name: trial for name, trial in begun.items() if name in adopted}
        self.elsewhere = {name: trial for name, trial in begun.items() if name not in adopted}
        self._hold_back([trial for trial in self.plan.todo if trial.name not in begun])
        self._reclaim_ended()

    def _hold_back(self, trials: list[Trial]) -> None:
        """Queue these trials, except those of a kind whose smallest trial has not shown yet that the kind can run."""
        kept = {kind_of(result.spec): result for result in self.plan.kept.values() if not cannot_run(result)}
        self.impossible = {
            kind: result
            for result in self.plan.kept.values()
            if cannot_run(result) and (kind := kind_of(result.spec)) not in kept
        }
        first = smallest_of_each_kind(trial for trial in self.plan.todo if kind_of(trial.spec) not in kept)
        for trial in trials:
            kind = kind_of(trial.spec)
            if kind in self.impossible or kind not in first or first[kind].name == trial.name:
                self.waiting.append(trial)
            else:
                self.held.setdefault(kind, []).append(trial)

    def _with_attempts(self, trial: Trial) -> Trial:
        """Add the attempts of an earlier runner that was killed, so that they count as retries of this trial."""
        if trial.name in self.plan.again:  # the user runs a finished trial again, so its retries count from 0
            return trial
        attempts = listed_attempts(trial.sweep, trial.name, trial.key)
        return replace(trial, earlier_attempts=attempts) if attempts else trial

    def tick(self) -> None:
        if time.monotonic() >= self.next_check:
            check_held(self.sweep)
            self.next_check = time.monotonic() + BEAT_SECONDS
        if self.stop.is_finishing:
            self._wind_down()
        else:
            self._submit_waiting()
        self._reclaim_ended()
        ended = self.engine.wait(_TICK_SECONDS if self.running else _IDLE_TICK_SECONDS)
        for end in self.endings.certain(ended, self.running, is_patient=not self.is_cancelled):
            self._finish(end)
        self._write_results()
        held = sum(map(len, self.held.values()))
        state = self.waits_for or self.engine.state()
        self.observer.tell("ticked", self.running, len(self.waiting) + held, state)

    def close(self) -> None:
        if self.running:
            self.engine.cancel()
        self.engine.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.unwritten and time.monotonic() < deadline:
            time.sleep(_IDLE_TICK_SECONDS)
            self._write_results()
        if self.unwritten:
            sys.stderr.write(
                f"flopwatch: {len(self.unwritten)} results are not in {self.sweep / RESULTS} yet ({self.waits_for}); "
                "run the same command again to add them\n"
            )

    def _write_results(self) -> None:
        while self.unwritten and self._can_write():
            try:
                record(self.sweep, self.unwritten[0])
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
                self._pause(error)
                return
            self.unwritten.popleft()
            self.waits_for = ""

    def _can_write(self) -> bool:
        return not self.waits_for or time.monotonic() >= self.next_try

    def _pause(self, error: OSError) -> None:
        self.waits_for = f"waiting: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        self.next_try = time.monotonic() + _PAUSE_SECONDS

    def _settle(self, result: TrialResult) -> None:
        self.unwritten.append(result)
        self._write_results()
        self.counts[result.outcome] += 1
        self.observer.tell("ended", result)
        kind = kind_of(result.spec)
        if cannot_run(result) and kind in self.held:
            self.impossible[kind] = result
        self.waiting.extend(self.held.pop(kind, ()))

    def _reclaim_ended(self) -> None:
        """Remove ended trials from `elsewhere`: record the result of each, or queue the trial again if it has none."""
        ended = [trial for trial in self.elsewhere.values() if self.endings.is_over(trial)]
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
        """Withdraw the trials that are queued in the engine. If `stop.kill` is set, kill the running ones too."""
        withdraw = getattr(self.engine, "withdraw", None)  # a user's own engine need not have this method
        for name in withdraw() if withdraw is not None else ():
            if (trial := self.running.pop(name, None)) is not None:
                self.waiting.append(trial)
        if self.stop.kill and not self.is_cancelled:
            self.is_cancelled = True
            self.engine.cancel()

    def _submit_waiting(self) -> None:
        while self.waiting and self._can_write() and (room := self.engine.room(self.waiting[0].spec)) > 0:
            batch = self._next_batch(room)
            if not batch:
                return
            self.engine.submit(batch)
            for trial in batch:
                self.running[trial.name] = trial
                self.observer.tell("started", trial)

    def _next_batch(self, room: int) -> list[Trial]:
        batch: list[Trial] = []
        while self.waiting and len(batch) < room:
            trial = self.waiting.popleft()
            settled = inferred_result(trial, self.out_of_memory) or self._skipped(trial)
            if settled is not None:
                self._settle(settled)
                continue
            try:
                prepare(trial)
            except StillRunsError:  # its supervisor's heartbeat had stopped, and has started again
                self.elsewhere[trial.name] = trial
                continue
            except OSError as error:
                if error.errno in TRANSIENT:  # such as a full disk; the trial stays the first of the queue
                    self.waiting.appendleft(trial)
                    self._pause(error)
                    break
                where = error.filename or trial.folder
                advice = "make this path readable and writable, or remove it"
                reason = f"not started ({error.strerror}: {where}); {advice}"
                self._settle(_not_run(trial, "lost", reason, "the sweep's folder"))
                continue
            self.waits_for = ""
            batch.append(trial)
        return batch

    def _finish(self, ended: Ended) -> None:
        trial = self.running.pop(ended.name, None)
        if trial is None:
            return
        result = result_of(trial, ended, is_cancelled=self.is_cancelled)
        has_run = not trial_claim(trial.folder).holder().is_withdrawn  # else no supervisor began: that is no attempt
        earlier = len(result.earlier_attempts) if has_run else self.false_starts[trial.name]
        if self.retries.tries_again(result, earlier, is_stopping=self.stop.is_finishing):
            self.false_starts[trial.name] += not has_run
            self.waiting.append(_next_attempt(trial, result) if has_run else trial)
            self.observer.tell("tries_again", result, earlier + 1, self.retries.most)
            return
        if proves_too_large(result):
            self.out_of_memory.append(result)
        self._settle(result)

    def _skipped(self, trial: Trial) -> TrialResult | None:
        """The result of a trial whose kind cannot run, as its smallest trial showed; None for any other."""
        smallest = self.impossible.get(kind_of(trial.spec))
        if smallest is None or smallest.name == trial.name:
            return None
        why = f"{smallest.name} could not begin ({smallest.outcome}: {smallest.reason})"
        return _not_run(trial, "skipped", f"not run, because {why}; once that is mended: --only failed", smallest.name)


def _not_run(trial: Trial, outcome: Outcome, reason: str, source: str) -> TrialResult:
    return TrialResult(trial.name, trial.key, trial.spec, outcome, reason, {"from": source})


def _next_attempt(trial: Trial, result: TrialResult) -> Trial:
    """Put the files of the last attempt aside and return the trial for its next attempt."""
    folder = None
    with contextlib.suppress(OSError):  # on a full disk `prepare` puts the files aside later
        folder = put_aside(trial.sweep, trial.name) if has_begun(trial.sweep, trial.name) else None
    attempts = (*result.earlier_attempts, attempt_from(result, folder))
    trial = replace(trial, earlier_attempts=attempts)
    # Write the attempts to disk now, in case this runner is killed. If that fails, `_next_batch` does it later.
    with contextlib.suppress(OSError):
        prepare(trial)
    return trial
