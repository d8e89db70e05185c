"""The two files that say what a sweep holds, read as far as they can be: a trial's result and the list of trials.

Standard library only: supervisors start with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.file_reading import UnreadableError, load_json
from flopwatch.record_reading import BrokenRecordError, read_record
from flopwatch.trial_records import FORMAT, TrialJob, TrialResult, is_trial_name

SWEEP = "sweep.json"
RESULTS = "results.jsonl"
PREFLIGHT = "preflight.json"
RESULT = "result.json"
RUNNERS = "runners"
LOCK = "lock"
"""Held by the runner before there was `runners`; tells the folder of a sweep."""

_LATEST_UNIX_TIME = 1e11
"""Some thousand years ahead; what is beyond it is no time."""


class NewerFormatError(Exception):
    """Written by a newer flopwatch: to be left alone.

    Attributes:
        format: Of the record.
    """

    def __init__(self, found: int) -> None:
        super().__init__(f"format {found}, written by a newer flopwatch; this one reads up to {FORMAT}")
        self.format = found


def result_from(content: Any) -> TrialResult:
    """A result's record.

    Raises:
        NewerFormatError: A newer flopwatch wrote it.
        BrokenRecordError: It is damaged.
    """
    return TrialResult.from_json(_of_this_format(content))


def trial_job_from(content: Any) -> TrialJob:
    """The record of a `spec.json`; raises as `result_from`."""
    return read_record(TrialJob, _of_this_format(content))


def _of_this_format(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise BrokenRecordError(f"it is {type(content).__name__}, not an object")
    newer = _newer_format(content)
    if newer is not None:
        raise NewerFormatError(newer)
    return content


@dataclass(frozen=True, slots=True)
class TrialList:
    """What `sweep.json` holds.

    Attributes:
        trials: Entries that have a name, by it, as they are.
        engine: What ran it.
        created: Unix time of the plan.
        trouble: Why the file, or some of it, cannot be read; empty when all is well.
        newer_format: Its format, when a newer flopwatch wrote it.
    """

    trials: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: str | None = None
    created: float | None = None
    trouble: str = ""
    newer_format: int | None = None


def read_trial_list(sweep: Path) -> TrialList:
    """The sweep's plan, as far as it can be read."""
    try:
        content = load_json(sweep / SWEEP)
    except FileNotFoundError:
        return TrialList()
    except UnreadableError as error:
        return TrialList(trouble=str(error))
    if not isinstance(content, dict):
        return TrialList(trouble="it is no object")
    engine, created, entries = content.get("engine"), content.get("created"), content.get("trials")
    named = {entry["name"]: entry for entry in entries if _is_named(entry)} if isinstance(entries, list) else {}
    damaged = sum(not _is_named(entry) for entry in entries) if isinstance(entries, list) else None
    return TrialList(
        named,
        engine if isinstance(engine, str) else None,
        float(created) if isinstance(created, int | float) and 0 < created < _LATEST_UNIX_TIME else None,
        "it has no list of trials" if damaged is None else f"it has {damaged} damaged entries" if damaged else "",
        _newer_format(content),
    )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and is_trial_name(entry["name"])


def _newer_format(content: Mapping[str, Any]) -> int | None:
    found = content.get("format", FORMAT)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > FORMAT else None


def read_result(file: Path) -> TrialResult | None:
    """The trial's end; None while there is none that can be read."""
    try:
        return load_result(file)
    except (FileNotFoundError, BrokenRecordError, NewerFormatError):
        return None


def load_result(file: Path) -> TrialResult:
    """The trial's end, from its own folder.

    Raises:
        FileNotFoundError: It has none.
        NewerFormatError: A newer flopwatch wrote it.
        BrokenRecordError: It is damaged.
    """
    try:
        result = result_from(load_json(file))
    except UnreadableError as error:
        raise BrokenRecordError(str(error)) from None
    if result.name != file.parent.name:
        raise BrokenRecordError(f"it is the result of {result.name[:80]!r}")
    return result
