"""Read a sweep's folder. The only file of the report that reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.record_reading import BrokenRecordError, clean_value, read_record
from flopwatch.sweep_results import SweepResults, gather_results, troubles
from flopwatch.trial_files import PREFLIGHT, read_json
from flopwatch.trial_records import TrialResult, TrialSpec


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
        troubles: What of the folder is damaged or of a newer format, a sentence each.
    """

    folder: Path
    results: Mapping[str, TrialResult]
    missing: Mapping[str, TrialSpec]
    engine: str | None = None
    created: float | None = None
    preflight: tuple[Mapping[str, Any], ...] = ()
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _PreflightRow:
    """What a row must have to be shown."""

    trainer: str
    model: str
    supported: bool
    reason: str | None = None
    tried: bool = True
    parameters: int | None = None


def capture_sweep(folder: Path) -> Capture:
    """Everything the report needs; raises InputError when this is no sweep's folder. Writes nothing."""
    found = gather_results(folder)
    results, planned = found.results, found.trial_list.trials
    ordered = {name: results[name] for name in planned if name in results}
    missing, unknown = _missing(found)
    told = troubles(found)
    if unknown:
        names = ", ".join(unknown[:5]) + (" and more" if len(unknown) > 5 else "")
        told = (*told, f"the configurations of {len(unknown)} trials are damaged in the plan and left out: {names}")
    return Capture(
        folder,
        {**ordered, **results},
        missing,
        found.trial_list.engine,
        found.trial_list.created,
        _read_preflight(folder),
        told,
    )


def _missing(found: SweepResults) -> tuple[dict[str, TrialSpec], list[str]]:
    """Planned trials without a result, and the names of those nobody can say what they were."""
    # A trial that was given another name since has its result under the old one.
    known = {result.key for result in found.results.values()}
    specs, unknown = {}, []
    for name, trial in found.trial_list.trials.items():
        if name in found.results or name in found.newer or _is_known(trial.get("key"), known):
            continue
        try:
            specs[name] = TrialSpec.from_json(trial.get("spec", {}))
        except BrokenRecordError:
            unknown.append(name)
    return specs, unknown


def _is_known(key: object, known: set[str]) -> bool:
    return isinstance(key, str) and key in known


def _read_preflight(folder: Path) -> tuple[Mapping[str, Any], ...]:
    content = read_json(folder / PREFLIGHT)
    rows = []
    for row in content if isinstance(content, list) else ():
        try:
            read_record(_PreflightRow, row)
            rows.append(clean_value(row))
        except BrokenRecordError:
            continue
    return tuple(rows)
