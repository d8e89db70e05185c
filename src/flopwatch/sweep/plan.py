"""What of a sweep is left to run: resume by content, choose by outcome, order by a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flopwatch.errors import InputError
from flopwatch.models.names import check_model_name
from flopwatch.sweep.engines.protocol import Trial
from flopwatch.sweep.environment import fingerprint
from flopwatch.sweep.folder import record, result_file
from flopwatch.sweep.names import trial_names
from flopwatch.trial_files import RESULTS, SWEEP, read_json, read_result, read_results, trial_folder
from flopwatch.trial_records import FAILED, OUT_OF_MEMORY, TrialResult, TrialSpec, content_key

UNSETTLED = ("cancelled", "lost", "skipped")
"""Run again by every resume: they say nothing about the configuration."""

ONLY = ("failed", "oom", "missing")


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    trials: The whole matrix, in the order asked for.
    todo: What will run, in the order it will.
    kept: Results that stand.
    again: Names of trials to do that have a result already.
    asked: Names of the matrix, or of the slice of it that `--limit` chose.
    """

    trials: tuple[Trial, ...]
    todo: tuple[Trial, ...]
    kept: dict[str, TrialResult]
    again: frozenset[str] = frozenset()
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
    """Compare the matrix with what the folder holds.

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
    trials = tuple(
        Trial(sweep, name, content_key(spec, fingerprint(spec, is_here=engine == "local")), spec)
        for name, spec in zip(trial_names(specs), specs, strict=True)
    )
    earlier = _earlier_results(sweep)
    _refuse_changes(sweep, trials)
    by_key = {result.key: result for result in earlier.values()}
    kept = {trial.name: by_key[trial.key] for trial in trials if trial.key in by_key}
    asked = trials[_slice(limit)]
    chosen = [trial for trial in asked if _is_wanted(kept.get(trial.name), only)]
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(chosen)
    again = frozenset(trial.name for trial in chosen if trial.name in kept)
    standing = {name: kept[name] for name in kept if name not in again}
    return Plan(trials, tuple(chosen), standing, again, tuple(trial.name for trial in asked))


def _is_wanted(result: TrialResult | None, only: str | None) -> bool:
    if only == "failed":
        return result is not None and result.outcome in FAILED
    if only == "oom":
        return result is not None and result.outcome in OUT_OF_MEMORY
    if only == "missing":
        return result is None
    return result is None or result.outcome in UNSETTLED


def _earlier_results(sweep: Path) -> dict[str, TrialResult]:
    """What is recorded, and what ended after the last runner was gone and is now recorded too."""
    if not (sweep / SWEEP).exists() and not (sweep / RESULTS).exists():
        return {}
    found = read_results(sweep)
    trials_dir = sweep / "trials"
    for folder in trials_dir.iterdir() if trials_dir.is_dir() else ():
        if folder.name not in found or found[folder.name].outcome in UNSETTLED:
            result = read_result(result_file(sweep, folder.name))
            if result is not None and result != found.get(folder.name):
                record(sweep, result)
                found[folder.name] = result
    return found


def _refuse_changes(sweep: Path, trials: Sequence[Trial]) -> None:
    """The same name for another configuration would mix two experiments in one table."""
    listed = {entry["name"]: entry for entry in (read_json(sweep / SWEEP) or {}).get("trials", [])}
    for trial in trials:
        if trial.name not in listed:
            continue
        before = TrialSpec.from_json(listed[trial.name]["spec"]).measured_settings()
        now = trial.spec.measured_settings()
        changed = [key for key in now if _plain(now[key]) != _plain(before.get(key))]
        if changed:
            what = ", ".join(f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in changed)
            raise InputError(
                f"{trial.name} is already in {sweep} with another configuration ({what}); "
                "give the new sweep its own folder with --output, or ask for what it was"
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
        raise InputError(f"--limit {text!r} is no slice of the matrix; write 20, 100:200 or 100:")
    return slice(start, stop)


def folder_of(trial: Trial) -> Path:
    return trial_folder(trial.sweep, trial.name)
