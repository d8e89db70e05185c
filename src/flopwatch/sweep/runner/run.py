"""Runs what is left of a sweep on an engine. Light: it holds no result longer than it takes to write it down."""

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flopwatch.clock import Clock, monotonic_seconds
from flopwatch.records.reading import read_object, tail
from flopwatch.records.trial import UNSETTLED, TrialResult
from flopwatch.records.trial_files import STARTED, SWEEP, log_file
from flopwatch.sweep.attempts import attempt_from, listed_attempts, put_aside
from flopwatch.sweep.engines.protocol import Ended, Engine, ending_from_evidence, outcome_known_to_engine
from flopwatch.sweep.folder import Trial, folder_of, has_begun, own_result, prepare, record, restore_lists
from flopwatch.sweep.host import processes as process_tree
from flopwatch.sweep.runner.decisions import (
    DEFAULT_POLICY,
    RetryPolicy,
    hosts_to_avoid,
    inferred_result,
    proves_too_large,
)
from flopwatch.sweep.runner.observing import Observer as Observer
from flopwatch.sweep.runner.observing import RetryObserver, SafeObserver
from flopwatch.sweep.runner.observing import Stop as Stop
from flopwatch.sweep.runner.plan import Plan
from flopwatch.sweep.runner.waiting import LateResults, Pause, ResultWriter, SilentSupervisors, is_transient
from flopwatch.sweep.supervisor.build_result import with_finished_steps

_TICK_SECONDS = 0.25
_OF_ONE_FOLDER = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)

Refusal = Callable[[Trial], str | None]


@dataclass
class _Round:
    """The state of one run. `elsewhere` are trials of an earlier runner that may still run, unknown to the engine."""

    waiting: deque[Trial]
    stop: Stop
    retries: RetryPolicy
    running: dict[str, Trial] = field(default_factory=dict)
    elsewhere: dict[str, Trial] = field(default_factory=dict)
    out_of_memory: list[TrialResult] = field(default_factory=list)
    pause: Pause = field(default_factory=Pause)
    is_cancelled: bool = False


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
    """Run what is to do; every end is written to `results.jsonl` at once. Returns how many ended how.

    Args:
        plan: From `make_plan`.
        engine: Where trials are placed.
        observer: Is told; whatever it raises does not end the sweep.
        stop: Looked at several times a second.
        refuse: Says why a trial cannot run at all (its preflight failed), before a slot is used.
        retries: Which ends are followed by another attempt, and how often.
        budget_seconds: After so long nothing new is started; None is no end.
        clock: Of the budget.
    """
    began = clock()
    counts: dict[str, int] = {}
    observer = SafeObserver(observer)

    def write(result: TrialResult) -> None:
        if not (_sweep(plan) / SWEEP).exists():
            restore_lists(_sweep(plan), plan.trials, plan.kept.values(), engine.name)
        record(_sweep(plan), result)

    ledger = ResultWriter(write)

    def note(result: TrialResult) -> None:
        ledger.add(result)
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
        observer.ended(result)

    known = [result for result in plan.kept.values() if proves_too_large(result)]
    state = _Round(deque(plan.todo), stop, retries, out_of_memory=known)
    late, stuck = LateResults(), SilentSupervisors()
    _adopt(engine, plan, state)
    _look_elsewhere(state, plan, late, note)
    try:
        while state.running or ((state.waiting or state.elsewhere) and not stop.is_finishing):
            stop.is_over_budget = budget_seconds is not None and clock() - began >= budget_seconds
            if stop.is_finishing:
                _wind_down(engine, state)
            else:
                _fill(engine, state, observer, note, refuse)
            _look_elsewhere(state, plan, late, note)
            stuck.end_them(engine, state.running)
            ended = engine.wait(_TICK_SECONDS if state.running else 0.05)
            for end in late.sift(ended, state.running, is_patient=not state.is_cancelled):
                _settle(stuck.explain(end), state, note, observer)
            ledger.catch_up()
            trouble = state.pause.why or ledger.pause.why
            observer.ticked(state.running, len(state.waiting), trouble or engine.state())
    finally:
        if state.running:
            engine.cancel()
        engine.close()
        if unwritten := ledger.close():
            sys.stderr.write(f"flopwatch: {unwritten} results could not be listed; {ledger.pause.why}\n")
    return counts


def _sweep(plan: Plan) -> Path:
    return plan.trials[0].sweep


def _adopt(engine: Engine, plan: Plan, state: _Round) -> None:
    """Wait for what an earlier runner started and an engine still runs, instead of starting it again."""
    begun = [_with_attempts(trial, plan) for trial in plan.todo if folder_of(trial).exists()]
    adopted = set(engine.open(_sweep(plan), begun))
    state.running = {trial.name: trial for trial in begun if trial.name in adopted}
    state.elsewhere = {trial.name: trial for trial in begun if trial.name not in adopted}
    state.waiting = deque(trial for trial in plan.todo if trial.name not in adopted | set(state.elsewhere))


def _look_elsewhere(state: _Round, plan: Plan, late: LateResults, note: Callable[[TrialResult], None]) -> None:
    """Trials that nobody runs any more are ours: a result that came since the plan was made is final, others wait."""
    freed = [trial for trial in state.elsewhere.values() if late.is_over(trial)]
    for trial in freed:
        del state.elsewhere[trial.name]
        result = own_result(trial.sweep, trial.name) if trial.name not in plan.again else None
        if result is not None and result.key == trial.key and result.outcome not in UNSETTLED:
            note(result)
        else:
            state.waiting.append(trial)
    if freed:
        order = {trial.name: place for place, trial in enumerate(plan.todo)}
        state.waiting = deque(sorted(state.waiting, key=lambda trial: order[trial.name]))


def _with_attempts(trial: Trial, plan: Plan) -> Trial:
    """What a killed runner had tried already counts; a trial that has a result, and is asked for again, starts anew."""
    if trial.name in plan.again:
        return trial
    attempts = listed_attempts(trial.sweep, trial.name, trial.key)
    return replace(trial, earlier_attempts=attempts, avoid=hosts_to_avoid(attempts)) if attempts else trial


def _wind_down(engine: Engine, state: _Round) -> None:
    """Nothing new starts: what an engine has queued comes back and stays unrun; if asked for, what runs is ended."""
    withdraw = getattr(engine, "withdraw", None)  # engines written before there was such a method have none
    for name in withdraw() if withdraw is not None else ():
        if (trial := state.running.pop(name, None)) is not None:
            state.waiting.append(trial)
    if state.stop.kill and not state.is_cancelled:
        state.is_cancelled = True
        engine.cancel()


def _fill(
    engine: Engine, state: _Round, observer: Observer, note: Callable[[TrialResult], None], refuse: Refusal
) -> None:
    """Give the engine as many trials as it takes; those that need not run are settled on the way."""
    while state.waiting and state.pause.is_over() and (room := engine.room(state.waiting[0].spec)) > 0:
        batch: list[Trial] = []
        while state.waiting and len(batch) < room:
            trial = state.waiting.popleft()
            settled = _refused(trial, refuse) or inferred_result(trial, state.out_of_memory)
            if settled is not None:
                note(settled)
                continue
            trial = replace(trial, retries=state.retries.most)
            try:
                prepare(trial)
            except OSError as error:
                if is_transient(error):  # first in line again, until the disk has room
                    state.waiting.appendleft(trial)
                    state.pause.begin(error)
                    break
                if not isinstance(error, _OF_ONE_FOLDER):
                    raise
                note(_without_a_place(trial, error))
                continue
            state.pause.end()
            batch.append(trial)
        if not batch:
            return
        engine.submit(batch)
        for trial in batch:
            state.running[trial.name] = trial
            observer.started(trial)


def _without_a_place(trial: Trial, error: OSError) -> TrialResult:
    """One folder that cannot be used is no reason for the others not to run."""
    reason = f"could not be started: {error.strerror}: {error.filename}; make it readable and writable, or remove it"
    return TrialResult(trial.name, trial.key, trial.spec, "lost", reason, {"from": "the sweep's folder"})


def _refused(trial: Trial, refuse: Refusal) -> TrialResult | None:
    reason = refuse(trial)
    if reason is None:
        return None
    return TrialResult(trial.name, trial.key, trial.spec, "unsupported", reason, {"from": "preflight"})


def _settle(ended: Ended, state: _Round, note: Callable[[TrialResult], None], observer: Observer) -> None:
    trial = state.running.pop(ended.name, None)
    if trial is None:
        return
    result = _result_of(trial, ended, is_cancelled=state.is_cancelled)
    earlier = len(result.earlier_attempts)
    if state.retries.tries_again(result, earlier, is_stopping=state.stop.is_finishing):
        state.waiting.append(_again(trial, result))
        if isinstance(observer, RetryObserver):
            observer.tries_again(result, earlier + 1, state.retries.most)
        return
    if proves_too_large(result):
        state.out_of_memory.append(result)
    note(result)


def _result_of(trial: Trial, ended: Ended, *, is_cancelled: bool) -> TrialResult:
    result = own_result(trial.sweep, trial.name) or _without_result(trial, ended.evidence)
    if result.outcome == "cancelled" and not is_cancelled and (better := outcome_known_to_engine(ended.evidence)):
        evidence = {**result.evidence, **ended.evidence}
        result = replace(result, outcome=better[0], reason=better[1], evidence=evidence)
    result = with_finished_steps(result, folder_of(trial))
    return replace(result, earlier_attempts=result.earlier_attempts or trial.earlier_attempts)


def _again(trial: Trial, result: TrialResult) -> Trial:
    """The next attempt, at the end of the line: by then a failed node may be known as such to the engine."""
    folder = put_aside(trial.sweep, trial.name) if has_begun(trial.sweep, trial.name) else None
    attempts = (*result.earlier_attempts, attempt_from(result, folder))
    trial = replace(trial, earlier_attempts=attempts, avoid=hosts_to_avoid(attempts))
    with contextlib.suppress(OSError):  # it is written again before it runs
        prepare(trial)  # at once: should this runner be killed now, the next one knows of the attempt
    return trial


def _without_result(trial: Trial, evidence: Mapping[str, Any]) -> TrialResult:
    """The supervisor is gone and left no word. Its trial must be gone too, wherever its processes went."""
    process_tree.kill_marked(folder_of(trial).resolve())
    outcome, reason = ending_from_evidence(evidence)
    log = tail(log_file(trial.sweep, trial.name))
    began = read_object(folder_of(trial) / STARTED).get("unix_time")
    return TrialResult(
        trial.name,
        trial.key,
        trial.spec,
        outcome,
        reason,
        dict(evidence),
        unix_time=began if isinstance(began, int | float) and 0 < began < 1e11 else None,
        log_tail=log,
        earlier_attempts=listed_attempts(trial.sweep, trial.name, trial.key),
    )
