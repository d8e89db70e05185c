"""Reads a sweep's folder: the list of trials, all results, and what is damaged. Standard library only; writes nothing.

A trial's folder is authoritative, and `results.jsonl` is an index to which the runner appends. Either may be damaged,
missing or older than the other; a result that is intact in one of them is never lost.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flopwatch.errors import FlopwatchError, InputError
from flopwatch.records.reading import BrokenRecordError, UnreadableError, load_json, numbered_lines, read_record
from flopwatch.records.trial import FORMAT, UNSETTLED, TrialJob, TrialResult, is_trial_name
from flopwatch.records.trial_files import LOCK, RESULT, RESULTS, RUNNERS, SPEC, SWEEP, TRIALS

_LATEST_UNIX_TIME = 1e11
"""About the year 5138; a larger value is not a time."""


class NewerFormatError(FlopwatchError):
    """A newer flopwatch wrote the record, so it is neither read nor overwritten.

    Attributes:
        format: The record's format.
    """

    def __init__(self, found: int) -> None:
        super().__init__(f"format {found}, written by a newer flopwatch; this one reads up to {FORMAT}")
        self.format = found


def result_from(content: Any) -> TrialResult:
    """Build a result from the content of a `result.json` or of a line of `results.jsonl`.

    Raises:
        NewerFormatError: A newer flopwatch wrote it.
        BrokenRecordError: It is damaged.
    """
    return TrialResult.from_json(_of_this_format(content))


def trial_job_from(content: Any) -> TrialJob:
    """Build the record of a `spec.json`; raises the same errors as `result_from`."""
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
    """The content of `sweep.json`.

    Attributes:
        trials: The entries that have a name, unchanged, by their names.
        engine: The engine's name.
        created: Unix time at which the plan was written.
        trouble: Why the file, or part of it, cannot be read; empty if it is intact.
        newer_format: The file's format, if a newer flopwatch wrote it.
    """

    trials: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: str | None = None
    created: float | None = None
    trouble: str = ""
    newer_format: int | None = None


def read_trial_list(sweep: Path) -> TrialList:
    """Read `sweep.json`; damaged parts are left out and reported in `trouble`."""
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
    """Read a trial's `result.json`; None if there is none, or none that can be read."""
    try:
        return load_result(file)
    except (FileNotFoundError, BrokenRecordError, NewerFormatError):
        return None


def load_result(file: Path) -> TrialResult:
    """Read a trial's `result.json`.

    Raises:
        FileNotFoundError: The trial has no result.
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


_MOST_NAMES = 5


@dataclass(slots=True)
class SweepResults:
    """The content of a sweep's folder.

    Attributes:
        trial_list: The content of `sweep.json`.
        results: The newest readable result of every trial, by name.
        unlisted: Names of trials whose result is not in `results.jsonl`, because their runner died before writing it.
        damaged: Trials whose files cannot be read, with the reason.
        newer: Trials that a newer flopwatch wrote, with their format. They are neither read nor overwritten.
        broken_lines: Numbers of the lines of `results.jsonl` that cannot be read.
        list_trouble: Why `results.jsonl` as a whole cannot be read.
    """

    trial_list: TrialList
    results: dict[str, TrialResult] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, int] = field(default_factory=dict)
    broken_lines: list[int] = field(default_factory=list)
    list_trouble: str = ""

    @property
    def is_list_whole(self) -> bool:
        return not self.broken_lines and not self.list_trouble


def gather_results(sweep: Path) -> SweepResults:
    """Read everything that is intact; raises InputError if this is not the folder of a sweep."""
    if not is_sweep_folder(sweep):
        raise InputError(
            f"{sweep} is not the folder of a sweep: it has no {SWEEP}; name the folder `flopwatch sweep` wrote"
        )
    found = SweepResults(read_trial_list(sweep))
    attempts = _read_list(sweep / RESULTS, found)
    for name in _worth_opening(sweep, found):
        _read_own(sweep, name, found, attempts)
    found.damaged = {
        name: why for name, why in found.damaged.items() if name not in found.results and name not in found.newer
    }
    return found


def read_results(sweep: Path) -> dict[str, TrialResult]:
    """The newest result of every finished trial, by name."""
    return gather_results(sweep).results


def is_sweep_folder(sweep: Path) -> bool:
    """Whether a sweep wrote this folder. A sweep that lost its lists is recognised by its trials."""
    return any(os.path.lexists(sweep / name) for name in (SWEEP, RESULTS, RUNNERS, LOCK)) or any(
        os.path.lexists(sweep / TRIALS / name / file) for name in _trial_folders(sweep) for file in (RESULT, SPEC)
    )


def _read_list(file: Path, found: SweepResults) -> set[tuple[str, str, float | None]]:
    """Read `results.jsonl` into `found`; returns the attempts it lists, as (name, key, start)."""
    attempts: set[tuple[str, str, float | None]] = set()
    try:
        for number, content in numbered_lines(file):
            name = content.get("name") if isinstance(content, dict) else None
            try:
                result = result_from(content)
            except NewerFormatError as error:
                if isinstance(name, str) and is_trial_name(name):
                    found.newer[name] = error.format
                    found.results.pop(name, None)
                    continue
                found.broken_lines.append(number)
            except BrokenRecordError as error:
                found.broken_lines.append(number)
                if isinstance(name, str) and is_trial_name(name):
                    found.damaged[name] = f"line {number} of {RESULTS}: {error}"
            else:
                found.results[result.name] = result
                found.newer.pop(result.name, None)
                attempts.add((result.name, result.key, result.unix_time))
    except FileNotFoundError:
        pass
    except UnreadableError as error:
        found.list_trouble = str(error)
    return attempts


def _worth_opening(sweep: Path, found: SweepResults) -> list[str]:
    """Trials whose own result may be newer than the list, so that 10,000 files are not opened without need."""
    try:
        noted = (sweep / RESULTS).stat().st_mtime
    except OSError:
        noted = 0.0
    names = []
    for name, changed in _trial_folders(sweep).items():
        listed = found.results.get(name)
        if listed is None or listed.outcome in UNSETTLED or not found.is_list_whole or changed >= noted:
            names.append(name)
    return names


def _trial_folders(sweep: Path) -> dict[str, float]:
    """The names of the trials' folders, with the time at which each last changed."""
    folders = {}
    try:
        with os.scandir(sweep / TRIALS) as entries:
            for entry in entries:
                if is_trial_name(entry.name):
                    folders[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    except OSError:
        pass
    return folders


def _read_own(sweep: Path, name: str, found: SweepResults, attempts: set[tuple[str, str, float | None]]) -> None:
    """Take the trial's own result if the list does not have this attempt."""
    try:
        own = load_result(sweep / TRIALS / name / RESULT)
    except FileNotFoundError:
        return
    except NewerFormatError as error:
        if name not in found.results:
            found.newer[name] = error.format
        return
    except BrokenRecordError as error:
        found.damaged[name] = f"{RESULT}: {error}"
        return
    listed = found.results.get(name)
    is_known = (name, own.key, own.unix_time) in attempts
    is_better = listed is not None and listed.outcome in UNSETTLED and own.outcome not in UNSETTLED
    if listed is None or not is_known or is_better:
        found.results[name] = own
        found.unlisted.append(name)
        found.newer.pop(name, None)


def troubles(found: SweepResults) -> tuple[str, ...]:
    """Describe what is damaged in the folder, one sentence each; empty if everything is intact."""
    sentences = []
    if found.damaged:
        example = next(iter(found.damaged.items()))
        sentences.append(
            f"{_counted(len(found.damaged), 'trial is', 'trials are')} damaged and counted as missing: "
            f"{_some(list(found.damaged))} ({example[0]}: {example[1]}); the same sweep runs them again"
        )
    if found.newer:
        sentences.append(
            f"{_counted(len(found.newer), 'trial was', 'trials were')} written by a newer flopwatch (format "
            f"{max(found.newer.values())}) and left alone: {_some(list(found.newer))}; update flopwatch to read them"
        )
    if found.broken_lines:
        numbers = _some([str(number) for number in found.broken_lines])
        sentences.append(
            f"{_counted(len(found.broken_lines), 'line', 'lines')} of {RESULTS} cannot be read ({numbers}); "
            "the trials' own files were read instead"
        )
    if found.list_trouble:
        sentences.append(f"{RESULTS} cannot be read: {found.list_trouble}; the trials' own files were read instead")
    if found.trial_list.newer_format is not None:
        sentences.append(
            f"{SWEEP} was written by a newer flopwatch (format {found.trial_list.newer_format}); update flopwatch"
        )
    elif found.trial_list.trouble:
        sentences.append(
            f"{SWEEP} is damaged: {found.trial_list.trouble}; trials that have not run may be missing here"
        )
    return tuple(sentences)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
