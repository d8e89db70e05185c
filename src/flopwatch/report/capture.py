"""Read the folder of a sweep."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.records.sweep_results import SweepResults, gather_results, troubles
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.text import listed, plural


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything the report needs from a sweep's folder: results in the order of the plan, planned trials without one
    (`missing`), and a sentence for each part of the folder that cannot be read (`troubles`).
    """

    folder: Path
    results: Mapping[str, TrialResult]
    missing: Mapping[str, TrialSpec]
    engine: str | None = None
    created: float | None = None
    troubles: tuple[str, ...] = ()

    def trials(self) -> Iterator[tuple[str, TrialSpec, TrialResult | None]]:
        """Yield the name, configuration and result of each trial; those without a result come last."""
        yield from ((name, result.spec, result) for name, result in self.results.items())
        yield from ((name, spec, None) for name, spec in self.missing.items())


def capture_sweep(folder: Path) -> Capture:
    """Read the folder of a sweep and write nothing; raises InputError if it is not the folder of a sweep."""
    found = gather_results(folder)
    results, planned = found.results, found.trial_list.trials
    ordered = {name: results[name] for name in planned if name in results}
    missing, unknown = _missing(found)
    known_troubles = troubles(found)
    if unknown:
        known_troubles += (
            f"the plan has damaged configurations for {plural(len(unknown), 'trial')}, which the report leaves out: "
            f"{listed(unknown)}",
        )
    return Capture(
        folder,
        {**ordered, **results},
        missing,
        found.trial_list.engine,
        found.trial_list.created,
        known_troubles,
    )


def _missing(found: SweepResults) -> tuple[dict[str, TrialSpec], list[str]]:
    """Return the planned trials without a result, and the names of those whose configuration cannot be read."""
    # Compare keys (hashes of the configuration) too, because the result of a renamed trial is under its old name.
    known = {result.key for result in found.results.values()}
    specs, unknown = {}, []
    for name, trial in found.trial_list.trials.items():
        key = trial.get("key")
        if name in found.results or name in found.newer or (isinstance(key, str) and key in known):
            continue
        try:
            specs[name] = read_record(TrialSpec, trial.get("spec", {}))
        except BrokenRecordError:
            unknown.append(name)
    return specs, unknown
