"""Read a sweep's folder. The only file of the report that reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.trial_files import PREFLIGHT, SWEEP, read_json, read_results
from flopwatch.trial_records import TrialResult, TrialSpec

_PREFLIGHT_COLUMNS = ("trainer", "model", "supported")


@dataclass(frozen=True, slots=True)
class Capture:
    """What lies in the folder.

    Attributes:
        folder: Where.
        results: Finished trials by name, in the order they were asked for.
        missing: Trials of the plan without a result.
        engine: What ran it.
        created: Unix time of the plan.
        preflight: Which trainer can train which model.
    """

    folder: Path
    results: Mapping[str, TrialResult]
    missing: Mapping[str, TrialSpec]
    engine: str | None = None
    created: float | None = None
    preflight: tuple[Mapping[str, Any], ...] = ()


def capture_sweep(folder: Path) -> Capture:
    """Everything the report needs; raises InputError when this is no sweep's folder."""
    results = read_results(folder)
    content = read_json(folder / SWEEP)
    plan: Mapping[str, Any] = content if isinstance(content, dict) else {}
    trials = plan.get("trials")
    planned = {trial["name"]: trial for trial in trials if _is_planned(trial)} if isinstance(trials, list) else {}
    ordered = {name: results[name] for name in planned if name in results}
    # A trial that was given another name since has its result under the old one.
    known = {result.key for result in results.values()}
    missing = {name: trial for name, trial in planned.items() if name not in results and trial.get("key") not in known}
    engine, created = plan.get("engine"), plan.get("created")
    return Capture(
        folder,
        {**ordered, **results},
        {name: TrialSpec.from_json(trial["spec"]) for name, trial in missing.items()},
        engine if isinstance(engine, str) else None,
        float(created) if isinstance(created, int | float) else None,
        _read_preflight(folder),
    )


def _is_planned(trial: object) -> bool:
    return isinstance(trial, dict) and isinstance(trial.get("name"), str) and isinstance(trial.get("spec"), dict)


def _read_preflight(folder: Path) -> tuple[Mapping[str, Any], ...]:
    content = read_json(folder / PREFLIGHT)
    if not isinstance(content, list):
        return ()
    return tuple(row for row in content if isinstance(row, dict) and all(name in row for name in _PREFLIGHT_COLUMNS))
