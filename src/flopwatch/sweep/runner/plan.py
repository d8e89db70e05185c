"""What of a sweep is left to run: resume by content, choose by outcome, order by a seed."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flopwatch.errors import InputError
from flopwatch.models.presets import check_model_name
from flopwatch.records.reading import BrokenRecordError
from flopwatch.records.sweep_results import SweepResults, TrialList, gather_results, is_sweep_folder, troubles
from flopwatch.records.trial import FAILED, OUT_OF_MEMORY, UNSETTLED, TrialResult, TrialSpec, content_key
from flopwatch.records.trial_files import SWEEP
from flopwatch.sweep.folder import Trial, record
from flopwatch.sweep.host.environment import fingerprint
from flopwatch.sweep.spec.names import trial_names

ONLY = ("failed", "oom", "missing")


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    trials: The whole matrix, in the order asked for.
    todo: What will run, in the order it will.
    kept: Results that stand.
    again: Names of trials to do that have a result already.
    unlisted: Results that ended after their runner was gone; `record_unlisted` puts them into the list.
    newer: Names of trials that a newer flopwatch wrote: they are neither run nor counted.
    troubles: What of the folder is damaged or of a newer format, a sentence each.
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


def make_plan(
    sweep: Path,
    specs: Sequence[TrialSpec],
    *,
    only: str | None = None,
    limit: str | None = None,
    shuffle_seed: int | None = 0,
    engine: str = "local",
) -> Plan:
    """Compare the matrix with what the folder holds. Writes nothing.

    Args:
        sweep: The folder; it need not exist.
        specs: The matrix.
        only: `failed`, `oom` or `missing`: run just those.
        limit: `100:200` runs that slice of the matrix, `20` its first twenty.
        shuffle_seed: Order of running, so that drift of clocks and heat does not look like an effect; None keeps the
            matrix's.
        engine: Where trials run: on a cluster, this host is none of theirs.
    """
    if only is not None and only not in ONLY:
        raise InputError(f"--only takes {', '.join(ONLY)}; got {only!r}")
    for model in dict.fromkeys(spec.model for spec in specs if spec.trainer != "command"):
        check_model_name(model)

    def key_of(spec: TrialSpec) -> str:
        return content_key(spec, fingerprint(spec, is_here=engine == "local"))

    trials = tuple(Trial(sweep, name, key_of(spec), spec) for name, spec in zip(trial_names(specs), specs, strict=True))
    earlier = gather_results(sweep) if is_sweep_folder(sweep) else SweepResults(TrialList())
    adapted = match_memory_limits(trials, earlier.results, UNSETTLED, key_of)
    trials, raised = adapted.trials, adapted.raised
    _refuse_changes(sweep, trials, earlier.trial_list, may_change=raised if only == "oom" else frozenset())
    by_key = {result.key: result for result in earlier.results.values()}
    kept = {trial.name: by_key[trial.key] for trial in trials if trial.key in by_key}
    newer = frozenset(trial.name for trial in trials if trial.name in earlier.newer and trial.name not in kept)

    def is_wanted(trial: Trial) -> bool:
        return (only == "oom" and trial.name in raised) or _is_wanted(kept.get(trial.name), only)

    asked = trials[_slice(limit)]
    chosen = [trial for trial in asked if trial.name not in newer and is_wanted(trial)]
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
    """Put into the list what ended after the last runner was gone. For whoever holds the folder."""
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
    """The same name for another configuration would mix two experiments in one table."""
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
                f"give the new sweep its own folder with --output, or ask for what it was{_more_memory(changed)}"
            )


def _more_memory(changed: Sequence[str]) -> str:
    is_memory = list(changed) == ["memory_bytes"]
    return "; more memory for those that were out of it is --only oom" if is_memory else ""


def _listed_settings(listed: TrialList, name: str) -> dict[str, Any] | None:
    """None for a trial that is not listed, or whose entry is damaged."""
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


# The same sweep with more memory: what fitted stands, what was out of memory may run again with the new limit.


@dataclass(frozen=True, slots=True)
class MemoryLimitMatch:
    """Attributes:
    trials: As asked for; those whose end no larger limit would change have the limit they ended under.
    raised: Names of trials that were out of memory under a smaller limit.
    """

    trials: tuple[Trial, ...]
    raised: frozenset[str] = frozenset()


def match_memory_limits(
    trials: Sequence[Trial],
    earlier: Mapping[str, TrialResult],
    unsettled: Sequence[str],
    key_of: Callable[[TrialSpec], str],
) -> MemoryLimitMatch:
    """Compare the limits asked for with those of earlier ends.

    Args:
        trials: The matrix.
        earlier: The newest end of each.
        unsettled: Outcomes that say nothing, after which a trial runs again anyway.
        key_of: The content key of a configuration.
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
    """By nothing else, and by more: with less, nobody knows whether it still fits."""
    new, old = now.limits.memory_bytes, before.limits.memory_bytes
    if old is None or (new is not None and new <= old):
        return False
    return now.measured_settings() == {**before.measured_settings(), "memory_bytes": new}
