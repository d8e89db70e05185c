"""Decides which trials of a sweep run: at first, again after a failure, or not at all; and the exit status."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.models.presets import check_model_name
from flopwatch.records.reading import BrokenRecordError
from flopwatch.records.sweep_results import SweepResults, TrialList, gather_results, is_sweep_folder, troubles
from flopwatch.records.trial import (
    AFTER_THE_STEPS,
    FAILED,
    OUT_OF_MEMORY,
    UNSETTLED,
    Outcome,
    TrialResult,
    TrialSpec,
    content_key,
)
from flopwatch.records.trial_files import SWEEP
from flopwatch.sweep.attempts import Attempt
from flopwatch.sweep.folder import Trial, record
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.spec.names import trial_names

ONLY = ("failed", "oom", "missing")


@dataclass(frozen=True, slots=True)
class Plan:
    """The trials of a sweep, and which of them will run.

    Attributes:
        trials: The whole matrix, in its order.
        todo: Trials that will run, in the order of running.
        kept: Earlier results that stay, by name.
        again: Names of trials in `todo` that have a result already.
        unlisted: Results of trials that ended after their runner was gone; `record_unlisted` lists them.
        newer: Names of trials that a newer flopwatch wrote: they are neither run nor counted.
        troubles: Sentences about damaged files and files of a newer format.
        asked: Names of the matrix, or of the slice of it that `--limit` chose.
    """

    trials: tuple[Trial, ...]
    todo: tuple[Trial, ...]
    kept: dict[str, TrialResult]
    again: frozenset[str] = frozenset()
    unlisted: tuple[TrialResult, ...] = ()
    newer: frozenset[str] = frozenset()
    troubles: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def todo_in_matrix_order(self) -> list[Trial]:
        will_run = {trial.name for trial in self.todo}
        return [trial for trial in self.trials if trial.name in will_run]


def make_plan(
    sweep: Path,
    specs: Sequence[TrialSpec],
    *,
    only: str | None = None,
    limit: str | None = None,
    shuffle_seed: int | None = 0,
    engine: str = "local",
) -> Plan:
    """Compare the matrix with the results in the folder. Writes nothing.

    Args:
        sweep: The folder; it need not exist.
        specs: The matrix.
        only: `failed`, `oom` or `missing`: run just those.
        limit: `100:200` runs that slice of the matrix, `20` its first twenty.
        shuffle_seed: Shuffles the order of running, so that drift of clocks and temperature does not look like an
            effect of a setting; None keeps the order of the matrix.
        engine: `local` means that trials run on this host, whose devices then are part of their identity.
    """
    if only is not None and only not in ONLY:
        raise InputError(f"--only takes {', '.join(ONLY)}; got {only!r}")
    for model in dict.fromkeys(spec.model for spec in specs if spec.trainer != "command"):
        check_model_name(model)

    def key_of(spec: TrialSpec) -> str:
        return content_key(spec, fingerprint(spec, is_here=engine == "local"))

    trials = tuple(Trial(sweep, name, key_of(spec), spec) for name, spec in zip(trial_names(specs), specs, strict=True))
    earlier = gather_results(sweep) if is_sweep_folder(sweep) else SweepResults(TrialList())
    match = match_memory_limits(trials, earlier.results, UNSETTLED, key_of)
    raised = match.raised if only == "oom" else frozenset()
    _refuse_changes(sweep, match.trials, earlier.trial_list, may_change=raised)
    return _choose(match.trials, earlier, match.trials[_slice(limit)], only, raised, shuffle_seed)


def _choose(
    trials: tuple[Trial, ...],
    earlier: SweepResults,
    asked: tuple[Trial, ...],
    only: str | None,
    raised: frozenset[str],
    shuffle_seed: int | None,
) -> Plan:
    by_key = {result.key: result for result in earlier.results.values()}
    kept = {trial.name: by_key[trial.key] for trial in trials if trial.key in by_key}
    newer = frozenset(trial.name for trial in trials if trial.name in earlier.newer and trial.name not in kept)
    chosen = [
        trial
        for trial in asked
        if trial.name not in newer and (trial.name in raised or _is_wanted(kept.get(trial.name), only))
    ]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(chosen)
    again = frozenset(trial.name for trial in chosen if trial.name in kept)
    return Plan(
        trials,
        tuple(chosen),
        {name: kept[name] for name in kept if name not in again},
        again,
        tuple(earlier.results[name] for name in earlier.unlisted),
        newer,
        troubles(earlier),
        tuple(trial.name for trial in asked),
    )


def record_unlisted(sweep: Path, plan: Plan) -> None:
    """Append results of trials that ended after their runner was gone. Call it while holding the folder."""
    for result in plan.unlisted:
        record(sweep, result)


def _is_wanted(result: TrialResult | None, only: str | None) -> bool:
    if only == "failed":
        return result is not None and result.outcome in FAILED
    if only == "oom":
        return result is not None and result.outcome in OUT_OF_MEMORY
    if only == "missing":
        return result is None
    return result is None or result.outcome in UNSETTLED


def _refuse_changes(
    sweep: Path, trials: Sequence[Trial], listed: TrialList, *, may_change: frozenset[str] = frozenset()
) -> None:
    """Raise InputError when a name stands for another configuration now: a table would mix two experiments."""
    if listed.newer_format is not None:
        raise InputError(
            f"{sweep / SWEEP} was written by a newer flopwatch (format {listed.newer_format}) and is not overwritten; "
            "update flopwatch, or give the new sweep its own folder with --output"
        )
    for trial in trials:
        before = _listed_settings(listed, trial.name)
        if before is None or trial.name in may_change:
            continue
        now = trial.spec.measured_settings()
        changed = [key for key in now if _plain(now[key]) != _plain(before.get(key))]
        if changed:
            what = ", ".join(f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in changed)
            raise InputError(
                f"{trial.name} is already in {sweep} with another configuration ({what}); "
                f"give the new sweep its own folder with --output, or use the earlier settings{_more_memory(changed)}"
            )


def _more_memory(changed: Sequence[str]) -> str:
    is_memory = list(changed) == ["memory_bytes"]
    return "; --only oom gives more memory to the trials that ran out of it" if is_memory else ""


def _listed_settings(listed: TrialList, name: str) -> dict[str, Any] | None:
    """None when the trial is not listed, or its entry is damaged."""
    try:
        return TrialSpec.from_json(listed.trials[name]["spec"]).measured_settings()
    except (KeyError, BrokenRecordError):
        return None


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
        raise InputError(f"--limit {text!r} is no slice of the matrix; write 20, 100:200 or 100:")
    return slice(start, stop)


@dataclass(frozen=True, slots=True)
class MemoryLimitMatch:
    """A matrix compared with the memory limits of earlier results.

    Attributes:
        trials: The matrix; trials that fitted into a smaller limit keep that limit, and so their results.
        raised: Names of trials that ran out of memory under a smaller limit.
    """

    trials: tuple[Trial, ...]
    raised: frozenset[str] = frozenset()


def match_memory_limits(
    trials: Sequence[Trial],
    earlier: Mapping[str, TrialResult],
    unsettled: Sequence[str],
    key_of: Callable[[TrialSpec], str],
) -> MemoryLimitMatch:
    """Keep the results of a sweep that is run again with more memory, where memory was not the problem.

    Args:
        trials: The matrix.
        earlier: The latest result of each trial.
        unsettled: Outcomes after which a trial runs again in any case.
        key_of: Returns the content key of a configuration.
    """
    raised = []
    found = []
    for trial in trials:
        result = earlier.get(trial.name)
        if result is not None and result.outcome not in unsettled and _differs_by_more_memory(trial.spec, result.spec):
            if result.outcome in OUT_OF_MEMORY:
                raised.append(trial.name)
            else:
                limits = replace(trial.spec.limits, memory_bytes=result.spec.limits.memory_bytes)
                spec = replace(trial.spec, limits=limits)
                trial = replace(trial, spec=spec, key=key_of(spec))
        found.append(trial)
    return MemoryLimitMatch(tuple(found), frozenset(raised))


def _differs_by_more_memory(now: TrialSpec, before: TrialSpec) -> bool:
    """Whether only the memory limit differs, and is larger now. Under a smaller one a trial may no longer fit."""
    new, old = now.limits.memory_bytes, before.limits.memory_bytes
    if old is None or (new is not None and new <= old):
        return False
    return now.measured_settings() == {**before.measured_settings(), "memory_bytes": new}


LOST: tuple[Outcome, ...] = ("lost",)
"""Outcomes that say nothing about the configuration: a node failed, a job was preempted, a supervisor vanished."""

_NOT_THE_NODE = ("PREEMPTED", "REVOKED")
"""States of jobs that Slurm itself ended; their node is not at fault."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Which trials are tried again.

    Attributes:
        most: Retries of one trial.
        outcomes: Outcomes that are tried again; failures of the trainer itself only if the user names them.
    """

    most: int = 2
    outcomes: tuple[Outcome, ...] = LOST

    def tries_again(self, result: TrialResult, earlier: int, *, is_stopping: bool = False) -> bool:
        """Whether another attempt follows this result.

        >>> from flopwatch.records.trial import TrialSpec
        >>> lost = TrialResult("t", "key", TrialSpec("standard", "tiny", 1, 1), "lost")
        >>> RetryPolicy(most=2).tries_again(lost, earlier=1), RetryPolicy(most=2).tries_again(lost, earlier=2)
        (True, False)
        """
        return not is_stopping and result.outcome in self.outcomes and earlier < self.most


DEFAULT_POLICY = RetryPolicy()


def retry_policy(most: int, also: Sequence[str] = ()) -> RetryPolicy:
    """A policy for lost trials, and for the outcomes a user names.

    >>> retry_policy(3, ["error", "crash"]).outcomes
    ('lost', 'crash', 'error')
    """
    allowed = [outcome for outcome in FAILED if outcome != "invalid"]
    if unknown := [word for word in also if word not in allowed]:
        raise InputError(f"--retry-on takes {', '.join(allowed)}; got {', '.join(unknown)}")
    return RetryPolicy(most, tuple(dict.fromkeys((*LOST, *(outcome for outcome in allowed if outcome in also)))))


def hosts_to_avoid(attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """The node of the last attempt, unless it is not at fault. Only one: with all nodes excluded nothing could run.

    >>> hosts_to_avoid([{"host": "n1"}, {"host": "n2", "state": "NODE_FAIL"}]), hosts_to_avoid([])
    (('n2',), ())
    """
    if not attempts or attempts[-1].get("state") in _NOT_THE_NODE:
        return ()
    host = attempts[-1].get("host")
    return (host,) if isinstance(host, str) and host else ()


def is_larger(spec: TrialSpec, failed: TrialSpec) -> bool:
    """Whether it needs at least as much memory as the failed one: equal but for a larger batch or sequence length.

    >>> is_larger(TrialSpec("ghost", "1b", 8, 512), TrialSpec("ghost", "1b", 4, 512))
    True
    """
    if spec.batch_size < failed.batch_size or spec.seq_len < failed.seq_len:
        return False
    same = replace(spec, batch_size=failed.batch_size, seq_len=failed.seq_len)
    return spec != failed and same.measured_settings() == failed.measured_settings()


def proves_too_large(result: TrialResult) -> bool:
    """Whether larger trials would run out of memory too.

    Not when Ray's memory monitor killed it (`error` in the evidence): that may hit a small trial beside a large one.
    Not after its steps either: there flopwatch's own work needs the memory.
    """
    is_its_own = result.outcome in ("oom_device", "oom_host") and "error" not in result.evidence
    return is_its_own and result.phase not in AFTER_THE_STEPS


def inferred_result(trial: Trial, failures: Sequence[TrialResult]) -> TrialResult | None:
    """The result of a trial that need not run, because a smaller one ran out of memory; None when it must run."""
    for failure in failures:
        if is_larger(trial.spec, failure.spec):
            return TrialResult(
                name=trial.name,
                key=trial.key,
                spec=trial.spec,
                outcome="oom_inferred",
                reason=f"not run: {failure.name} ran out of memory already",
                evidence={"from": failure.name, "outcome": failure.outcome},
            )
    return None


GREEN = ("ok", "oom_device", "oom_host", "oom_inferred", "unsupported", "skipped")
"""Outcomes that are no failure: measured, out of memory (a limit that was found), or not run by a rule."""

DONE, SOME_FAILED, STOPPED = 0, 1, 130
OVER_BUDGET = 75
"""EX_TEMPFAIL of sysexits.h: the same command continues the sweep."""


def exit_status(plan: Plan, counts: Mapping[str, int], *, was_stopped: bool, is_over_budget: bool = False) -> int:
    """0; 1 when a trial failed now or in an earlier run; 130 when stopped, 75 when over budget, with trials left.

    Args:
        plan: The plan.
        counts: Number of trials per outcome, of this run.
        was_stopped: By Ctrl-C.
        is_over_budget: The budget ended before all trials were started.
    """
    if was_stopped and trials_left(plan, counts):
        return STOPPED  # as shells report Ctrl-C, so that `sweep && report` stops here
    if is_over_budget and trials_left(plan, counts):
        return OVER_BUDGET
    is_red = trials_left(plan, counts) or any(outcome not in GREEN for outcome, count in counts.items() if count)
    return SOME_FAILED if is_red or failed_before(plan) or _has_newer_results(plan) else DONE


def trials_left(plan: Plan, counts: Mapping[str, int]) -> int:
    """Trials of the plan that were to run and have no final result."""
    return len(plan.todo) - sum(count for outcome, count in counts.items() if outcome not in UNSETTLED)


def failed_before(plan: Plan) -> int:
    """Trials of the matrix that failed in an earlier run and were not run again."""
    return sum(plan.kept[name].outcome not in GREEN for name in plan.asked if name in plan.kept)


def _has_newer_results(plan: Plan) -> bool:
    """Their results cannot be read, so they may be failures."""
    return any(name in plan.newer for name in plan.asked)
