"""Read a sweep's folder. The only file of the report that reads."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.records.reading import BrokenRecordError, clean_value, read_json, read_record
from flopwatch.records.sweep_results import NewerFormatError, SweepResults, gather_results, result_from, troubles
from flopwatch.records.trial import TrialResult, TrialSpec
from flopwatch.records.trial_files import PREFLIGHT, RESULTS


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


# Results of a sweep as they are written, while it runs.


_PAUSE_SECONDS = 0.5


def follow_results(folder: Path, offset: int, is_over: Callable[[], bool]) -> Iterator[TrialResult]:
    """Each result that is appended after `offset`, until the sweep is over and all are read.

    A line that is no result is left out: the report tells of it.
    """
    rest = b""
    while True:
        was_over = is_over()  # asked first: what is written before the end is read after it
        content, offset = _appended(folder / RESULTS, offset)
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            if (result := _result(line)) is not None:
                yield result
        if was_over and not content:
            return
        if not content:
            time.sleep(_PAUSE_SECONDS)


def _appended(file: Path, offset: int) -> tuple[bytes, int]:
    try:
        with file.open("rb") as stream:
            if stream.seek(0, os.SEEK_END) < offset:
                offset = 0  # written anew, as by a person who mends it; what is read twice does no harm
            stream.seek(offset)
            content = stream.read()
    except OSError:  # not written yet, or a shared file system that stutters
        return b"", offset
    return content, offset + len(content)


def _result(line: bytes) -> TrialResult | None:
    try:
        return result_from(json.loads(line))
    except (ValueError, RecursionError, NewerFormatError, BrokenRecordError):
        return None
