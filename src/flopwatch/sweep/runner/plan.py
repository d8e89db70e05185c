"""Decides which trials of a sweep are run, retried or skipped, and the exit status of the sweep. Writes no files."""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.errors import InputError
from flopwatch.records.sweep_results import SweepResults, TrialList, gather_results, is_sweep_folder, troubles
from flopwatch.records.trial import (
    AFTER_THE_STEPS,
    COMMAND,
    FAILED,
    OUT_OF_MEMORY,
    UNSETTLED,
    Outcome,
    TrialResult,
    TrialSpec,
    content_key,
)
from flopwatch.records.trial_files import SWEEP, TRIALS
from flopwatch.sweep.folder import Trial, record
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.spec.names import trial_names
from flopwatch.text import listed, plural

ONLY = ("failed", "oom", "missing")


@dataclass(frozen=True, slots=True)
class Plan:
    """The trials of a sweep and which of them will run."""

    trials: tuple[Trial, ...]
    todo: tuple[Trial, ...]  # in the order in which they start
    kept: dict[str, TrialResult]  # results of earlier runs that stay valid, by trial name
    again: frozenset[str] = frozenset()  # names of trials in `todo` that run although they have a result
    unlisted: tuple[TrialResult, ...] = ()  # not in `results.jsonl`, because the runner was killed
    newer: frozenset[str] = frozenset()  # a newer flopwatch wrote their files: they are neither run nor counted
    troubles: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()  # names of all trials, or of those that `--limit` selects


def make_plan(
    sweep: Path,
    specs: Sequence[TrialSpec],
    *,
    only: str | None = None,
    limit: str | None = None,
    engine: str = "local",
) -> Plan:
    """Compare the trials of a sweep with the results in its folder, which need not exist yet, and choose those to run.

    Without `only`, these are all without a final result. With the engine `local`, results from devices that this host
    does not have are not valid.
    """
    if only is not None and only not in ONLY:
        raise InputError(f"--only must be one of {', '.join(ONLY)}, not {only!r}")

    def key_of(spec: TrialSpec) -> str:
        return content_key(spec, fingerprint(spec, is_here=engine == "local"))

    trials = tuple(Trial(sweep, name, key_of(spec), spec) for name, spec in zip(trial_names(specs), specs, strict=True))
    earlier = gather_results(sweep) if is_sweep_folder(sweep) else SweepResults(TrialList())
    # Trials that were planned, but never prepared, may be planned again with other settings.
    known, prepared = earlier.trial_list.trials.items(), {folder.name for folder in (sweep / TRIALS).glob("*")}
    begun = {name: entry for name, entry in known if name in earlier.results or name in prepared}
    earlier = replace(earlier, trial_list=replace(earlier.trial_list, trials=begun))
    trials, raised = match_memory_limits(trials, earlier.results, key_of)
    raised = raised if only == "oom" else frozenset()
    check_unchanged(sweep, trials, earlier.trial_list, may_change=raised)
    asked = trials[_slice(limit)]
    if not asked:
        raise InputError(
            f"--limit {limit!r} selects none of the {plural(len(trials), 'trial')}, which are numbered from 0"
        )
    plan = _choose(trials, earlier, asked, only, raised)
    return replace(plan, troubles=(*plan.troubles, *_outdated(plan.todo, earlier.results)))


def _outdated(todo: Sequence[Trial], earlier: Mapping[str, TrialResult]) -> tuple[str, ...]:
    """Say which source files changed since trials that will run again had a result."""
    trials, changed = 0, dict[str, None]()
    for trial in todo:
        result = earlier.get(trial.name)
        if result is None or result.key == trial.key or result.outcome in UNSETTLED:
            continue
        now, before = fingerprint(trial.spec).get("sources", {}), result.environment.get("sources") or {}
        names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
        trials, changed = trials + bool(names), changed | dict.fromkeys(names)
    if not changed:
        return ()
    verb = "has" if len(changed) == 1 else "have"
    return (f"{plural(trials, 'finished trial')} will run again: {listed(list(changed))} {verb} changed since",)


def _choose(
    trials: tuple[Trial, ...],
    earlier: SweepResults,
    asked: tuple[Trial, ...],
    only: str | None,
    raised: frozenset[str],
) -> Plan:
    by_key = {result.key: result for result in earlier.results.values()}
    kept = {trial.name: by_key[trial.key] for trial in trials if trial.key in by_key}
    names = tuple(trial.name for trial in asked)
    newer = frozenset(trial.name for trial in trials if trial.name in earlier.newer and trial.name not in kept)
    wanted = {None: UNSETTLED, "failed": (*FAILED, "skipped"), "oom": OUT_OF_MEMORY, "missing": ()}[only]

    def is_chosen(name: str) -> bool:
        if name in newer or name in raised:
            return name not in newer
        return kept[name].outcome in wanted if name in kept else only in (None, "missing")

    chosen = [trial for trial in asked if is_chosen(trial.name)]
    # In the order of the matrix, a device that gets warmer and slower would look like an effect of a setting.
    random.Random(0).shuffle(chosen)
    again = frozenset(trial.name for trial in chosen if trial.name in kept)
    return Plan(
        trials,
        tuple(chosen),
        {name: kept[name] for name in kept if name not in again},
        again,
        tuple(earlier.results[name] for name in earlier.unlisted),
        newer,
        troubles(earlier),
        names,
    )


def record_unlisted(sweep: Path, plan: Plan) -> None:
    """Append the results `plan.unlisted` to `results.jsonl`. The caller must hold the lock of the sweep's folder."""
    for result in plan.unlisted:
        record(sweep, result)


def check_unchanged(
    sweep: Path, trials: Sequence[Trial], known: TrialList, *, may_change: frozenset[str] = frozenset()
) -> None:
    """Raise InputError if the folder has a trial with the name of a planned trial but another configuration.

    Otherwise the sweep's table would mix two experiments.
    """
    if known.newer_format is not None:
        raise InputError(
            f"{sweep / SWEEP} was written by a newer flopwatch (format {known.newer_format}) and is not overwritten; "
            "update flopwatch, or choose another folder with --output"
        )
    for trial in trials:
        try:
            before = read_record(TrialSpec, known.trials[trial.name]["spec"]).measured_settings()
        except (KeyError, BrokenRecordError):  # the trial is not listed, or its entry is damaged
            continue
        if trial.name in may_change:
            continue
        now = trial.spec.measured_settings()
        changed = [key for key in now if _plain(now[key]) != _plain(before.get(key))]
        if changed:
            what = ", ".join(f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in changed)
            is_memory = changed == ["memory_bytes"]
            advice = "; or use --only oom to run again only the trials that ran out of memory" if is_memory else ""
            raise InputError(
                f"the trial {trial.name} is already in {sweep} with another configuration ({what}); choose another "
                f"folder with --output, or use the earlier settings{advice}"
            )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _slice(text: str | None) -> slice:
    if text is None:
        return slice(None)
    first, colon, last = text.partition(":")
    try:
        start, stop = (int(first or 0), int(last) if last else None) if colon else (0, int(first))
    except ValueError:
        start, stop = -1, None
    if start < 0 or (stop is not None and stop <= start):
        raise InputError(f"--limit {text!r} is not a slice of the trials; write for example 20, 100:200 or 100:")
    return slice(start, stop)


def match_memory_limits(
    trials: Sequence[Trial], earlier: Mapping[str, TrialResult], key_of: Callable[[TrialSpec], str]
) -> tuple[tuple[Trial, ...], frozenset[str]]:
    """All trials, and the names of those that ran out of memory under a lower limit, which can run again.

    Any other trial with a result gets the old limit back, so that its result stays valid: more would not change it.
    """
    raised, found = [], []
    for trial in trials:
        result = earlier.get(trial.name)
        if result is not None and result.outcome not in UNSETTLED and _differs_by_more_memory(trial.spec, result.spec):
            if result.outcome in OUT_OF_MEMORY:
                raised.append(trial.name)
            else:
                limits = replace(trial.spec.limits, memory_bytes=result.spec.limits.memory_bytes)
                spec = replace(trial.spec, limits=limits)
                trial = replace(trial, spec=spec, key=key_of(spec))
        found.append(trial)
    return tuple(found), frozenset(raised)


def _differs_by_more_memory(now: TrialSpec, before: TrialSpec) -> bool:
    new, old = now.limits.memory_bytes, before.limits.memory_bytes
    if old is None or (new is not None and new <= old):
        return False
    return now.measured_settings() == {**before.measured_settings(), "memory_bytes": new}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which trials are retried, and how often. `lost` always is, because its cause may be a failed node."""

    most: int = 2
    outcomes: tuple[Outcome, ...] = ("lost",)

    def tries_again(self, result: TrialResult, earlier: int, *, is_stopping: bool = False) -> bool:
        return not is_stopping and result.outcome in self.outcomes and earlier < self.most


DEFAULT_POLICY = RetryPolicy()


def retry_policy(most: int, also: Sequence[str] = ()) -> RetryPolicy:
    allowed = [outcome for outcome in FAILED if outcome != "invalid"]
    if unknown := [word for word in also if word not in allowed]:
        raise InputError(f"retry_on must be one of {', '.join(allowed)}, not {', '.join(unknown)}")
    return RetryPolicy(most, tuple(dict.fromkeys(("lost", *(outcome for outcome in allowed if outcome in also)))))


def is_larger(spec: TrialSpec, failed: TrialSpec) -> bool:
    """Whether a trial is the failed trial with a larger batch size or sequence length, so that it needs more memory."""
    if spec.batch_size < failed.batch_size or spec.seq_len < failed.seq_len:
        return False
    same = replace(spec, batch_size=failed.batch_size, seq_len=failed.seq_len)
    return spec != failed and same.measured_settings() == failed.measured_settings()


def proves_too_large(result: TrialResult) -> bool:
    """Whether this result proves that larger trials would run out of memory too.

    Out of memory proves it except in two cases. If Ray's memory monitor killed the trial (`error` in the evidence), the
    trial that used too much memory may be another one. If the trial ran out of memory after its steps, flopwatch's own
    measurements used the memory.
    """
    is_its_own = result.outcome in ("oom_device", "oom_host") and "error" not in result.evidence
    return is_its_own and result.phase not in AFTER_THE_STEPS


def inferred_result(trial: Trial, failures: Sequence[TrialResult]) -> TrialResult | None:
    """Return the result `oom_inferred` if a smaller trial in `failures` ran out of memory; None if `trial` must run."""
    failure = next((failure for failure in failures if is_larger(trial.spec, failure.spec)), None)
    if failure is None:
        return None
    reason = f"not run, because the smaller trial {failure.name} ran out of memory"
    evidence = {"from": failure.name, "outcome": failure.outcome}
    return TrialResult(trial.name, trial.key, trial.spec, "oom_inferred", reason, evidence)


_NOT_THE_KIND = ("batch_size", "seq_len", "seed", "micro_batch_size", "privacy", "memory_bytes")


def kind_of(spec: TrialSpec) -> str:
    """What trials that differ only in their size and seed have in common; for a command, this trial alone."""
    settings = spec.measured_settings()
    kept = settings if spec.trainer == COMMAND else {k: settings[k] for k in settings if k not in _NOT_THE_KIND}
    return json.dumps(kept, sort_keys=True)


def smallest_of_each_kind(trials: Iterable[Trial]) -> dict[str, Trial]:
    found: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda trial: (trial.spec.batch_size * trial.spec.seq_len, trial.name)):
        found.setdefault(kind_of(trial.spec), trial)
    return found


_BEFORE_THE_STEPS = ("start", "import", "build")


def cannot_run(result: TrialResult) -> bool:
    """Whether no trial of this kind can run, whatever its size, because this one did not get to the end of a step.

    An `error` in the first step proves nothing, because it may depend on the size: BatchNorm raises one for one sample.
    """
    if result.outcome not in ("error", "unsupported", "invalid") or result.spec.trainer == COMMAND:
        return False
    is_in_first_step = result.phase in ("warmup", "measure") and not result.step and result.measured.steps is None
    return result.phase in _BEFORE_THE_STEPS or (is_in_first_step and result.outcome != "error")


GREEN = ("ok", "oom_device", "oom_host", "oom_inferred", "unsupported", "skipped")
"""Outcomes that do not make a sweep fail. Out of memory is one of them, because sweeps search for the memory limit."""

DONE, SOME_FAILED, STOPPED = 0, 1, 130
OVER_BUDGET = 75
"""Exit status EX_TEMPFAIL of sysexits.h: the user can run the same command again to continue the sweep."""


def exit_status(plan: Plan, counts: Mapping[str, int], *, was_stopped: bool, is_over_budget: bool = False) -> int:
    """Return 130 if Ctrl-C left trials without a result, and 75 if the time budget did. Otherwise return 1 if a trial
    failed, now or in an earlier run, and 0 if none failed. `counts` is the number of ended trials by outcome.
    """
    if was_stopped and trials_left(plan, counts):
        return STOPPED  # shells use this status after Ctrl-C, so `sweep && report` does not run the report
    if is_over_budget and trials_left(plan, counts):
        return OVER_BUDGET
    is_red = trials_left(plan, counts) or any(outcome not in GREEN for outcome, count in counts.items() if count)
    has_unreadable_results = any(name in plan.newer for name in plan.asked)  # a newer flopwatch wrote them
    return SOME_FAILED if is_red or failed_before(plan) or has_unreadable_results else DONE


def trials_left(plan: Plan, counts: Mapping[str, int]) -> int:
    return len(plan.todo) - sum(count for outcome, count in counts.items() if outcome not in UNSETTLED)


def failed_before(plan: Plan) -> int:
    return sum(plan.kept[name].outcome not in GREEN for name in plan.asked if name in plan.kept)
