"""Runs what is left of a sweep on an engine. Light: it holds no result longer than it takes to write it down."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flopwatch.sweep import process_tree
from flopwatch.sweep.conclude import tail
from flopwatch.sweep.engines.evidence import ending_from_evidence, explained
from flopwatch.sweep.engines.protocol import Ended, Engine, Trial
from flopwatch.sweep.folder import own_result, prepare, record
from flopwatch.sweep.inference import inferred, proves_too_large
from flopwatch.sweep.late_ends import LateEnds
from flopwatch.sweep.plan import UNSETTLED, Plan, folder_of
from flopwatch.sweep.stuck import StuckSupervisors
from flopwatch.trial_files import log_file
from flopwatch.trial_records import TrialResult

_TICK_SECONDS = 0.25

Refusal = Callable[[Trial], str | None]


class Observer(Protocol):
    """Is told what happens; the command line draws its table from it."""

    def started(self, trial: Trial) -> None: ...

    def ended(self, result: TrialResult) -> None: ...

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None: ...


@dataclass
class Stop:
    """Set from outside. `finish` starts nothing new, `kill` also ends what runs."""

    finish: bool = False
    kill: bool = False


@dataclass
class _Round:
    """The state of one run. `elsewhere` are trials of an earlier runner that may still run, unknown to the engine."""

    waiting: deque[Trial]
    running: dict[str, Trial] = field(default_factory=dict)
    elsewhere: dict[str, Trial] = field(default_factory=dict)
    out_of_memory: list[TrialResult] = field(default_factory=list)
    is_cancelled: bool = False


def run_plan(
    plan: Plan, engine: Engine, observer: Observer, stop: Stop, refuse: Refusal = lambda trial: None
) -> dict[str, int]:
    """Run what is to do; every end is written to `results.jsonl` at once. Returns how many ended how.

    Args:
        plan: From `make_plan`.
        engine: Where trials are placed.
        observer: Is told.
        stop: Looked at several times a second.
        refuse: Says why a trial cannot run at all (its preflight failed), before a slot is used.
    """
    counts: dict[str, int] = {}

    def note(result: TrialResult) -> None:
        record(_sweep(plan), result)
        counts[result.outcome] = counts.get(result.outcome, 0) + 1
        observer.ended(result)

    known = [result for result in plan.kept.values() if proves_too_large(result)]
    state = _Round(deque(plan.todo), out_of_memory=known)
    late, stuck = LateEnds(), StuckSupervisors()
    _adopt(engine, plan, state)
    _look_elsewhere(state, plan, late, note)
    try:
        while state.running or ((state.waiting or state.elsewhere) and not (stop.finish or stop.kill)):
            if stop.kill and not state.is_cancelled:
                state.is_cancelled = True
                engine.cancel()
            if not (stop.finish or stop.kill):
                _fill(engine, state, observer, note, refuse)
            _look_elsewhere(state, plan, late, note)
            stuck.end_them(engine, state.running)
            ended = engine.wait(_TICK_SECONDS if state.running else 0.05)
            for end in late.sift(ended, state.running, is_patient=not state.is_cancelled):
                _settle(stuck.explain(end), state, note)
            observer.ticked(state.running, len(state.waiting), engine.state())
    finally:
        if state.running:
            engine.cancel()
        engine.close()
    return counts


def _sweep(plan: Plan) -> Path:
    return plan.trials[0].sweep


def _adopt(engine: Engine, plan: Plan, state: _Round) -> None:
    """Wait for what an earlier runner started and an engine still runs, instead of starting it again."""
    begun = [trial for trial in plan.todo if folder_of(trial).exists()]
    adopted = set(engine.open(_sweep(plan), begun))
    state.running = {trial.name: trial for trial in begun if trial.name in adopted}
    state.elsewhere = {trial.name: trial for trial in begun if trial.name not in adopted}
    state.waiting = deque(trial for trial in plan.todo if trial.name not in adopted | set(state.elsewhere))


def _look_elsewhere(state: _Round, plan: Plan, late: LateEnds, note: Callable[[TrialResult], None]) -> None:
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


def _fill(
    engine: Engine, state: _Round, observer: Observer, note: Callable[[TrialResult], None], refuse: Refusal
) -> None:
    """Give the engine as many trials as it takes; those that need not run are settled on the way."""
    while state.waiting and (room := engine.room(state.waiting[0].spec)) > 0:
        batch: list[Trial] = []
        while state.waiting and len(batch) < room:
            trial = state.waiting.popleft()
            settled = _refused(trial, refuse) or inferred(trial, state.out_of_memory)
            if settled is not None:
                note(settled)
                continue
            prepare(trial)
            batch.append(trial)
        if not batch:
            return
        engine.submit(batch)
        for trial in batch:
            state.running[trial.name] = trial
            observer.started(trial)


def _refused(trial: Trial, refuse: Refusal) -> TrialResult | None:
    reason = refuse(trial)
    if reason is None:
        return None
    return TrialResult(trial.name, trial.key, trial.spec, "unsupported", reason, {"from": "preflight"})


def _settle(ended: Ended, state: _Round, note: Callable[[TrialResult], None]) -> None:
    trial = state.running.pop(ended.name, None)
    if trial is None:
        return
    result = own_result(trial.sweep, trial.name) or _without_result(trial, ended.evidence)
    if result.outcome == "cancelled" and not state.is_cancelled and (better := explained(ended.evidence)):
        evidence = {**result.evidence, **ended.evidence}
        result = replace(result, outcome=better[0], reason=better[1], evidence=evidence)
    if proves_too_large(result):
        state.out_of_memory.append(result)
    note(result)


def _without_result(trial: Trial, evidence: Mapping[str, Any]) -> TrialResult:
    """The supervisor is gone and left no word. Its trial must be gone too, wherever its processes went."""
    process_tree.kill_marked(folder_of(trial).resolve())
    outcome, reason = ending_from_evidence(evidence)
    log = tail(log_file(trial.sweep, trial.name))
    return TrialResult(trial.name, trial.key, trial.spec, outcome, reason, dict(evidence), log_tail=log)
