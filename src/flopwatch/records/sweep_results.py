"""Every result of a sweep, from its list and from its trials' own folders, and what of them is damaged.

The list is an index that a runner appends to; the truth of a trial is in its folder. Either may be damaged, gone or
behind the other, and a result that is whole in one of them is never lost. Reads only.
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

# The two files that say what a sweep holds, read as far as they can be: a trial's result and the list of trials.
#
# Standard library only: supervisors start with it.


_LATEST_UNIX_TIME = 1e11
"""Some thousand years ahead; what is beyond it is no time."""


class NewerFormatError(FlopwatchError):
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


_MOST_NAMES = 5


@dataclass(slots=True)
class SweepResults:
    """What lies in a sweep's folder.

    Attributes:
        trial_list: What `sweep.json` says.
        results: The newest end of every trial that has one that can be read, by name.
        unlisted: Names of those that are not in the list: their runner died before it noted them.
        damaged: Trials of which something is left and nothing can be read, with the reason.
        newer: Trials that a newer flopwatch wrote, with their format. They are left alone.
        broken_lines: Numbers of the lines of the list that cannot be read.
        list_trouble: Why the list of results as a whole cannot be read.
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
    """Everything that can be read; raises InputError when this is no sweep's folder."""
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
    """Every finished trial by name, the newest end of each."""
    return gather_results(sweep).results


def is_sweep_folder(sweep: Path) -> bool:
    """Whether a sweep wrote there; one that lost its lists still has its trials."""
    return any(os.path.lexists(sweep / name) for name in (SWEEP, RESULTS, RUNNERS, LOCK)) or any(
        os.path.lexists(sweep / TRIALS / name / file) for name in _trial_folders(sweep) for file in (RESULT, SPEC)
    )


def _read_list(file: Path, found: SweepResults) -> set[tuple[str, str, float | None]]:
    """The list of results; what is returned are the attempts it knows."""
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
    """Trials whose own result may say more than the list: 10,000 files are not opened where the list says it all."""
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
    """When each trial's folder last changed."""
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
    """The trial's own result, where the list does not know of this attempt."""
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
    """What a person must know of the folder's state, a sentence each; nothing when all is well."""
    told = []
    if found.damaged:
        example = next(iter(found.damaged.items()))
        told.append(
            f"{_counted(len(found.damaged), 'trial is', 'trials are')} damaged and counted as missing: "
            f"{_some(list(found.damaged))} ({example[0]}: {example[1]}); the same sweep runs them again"
        )
    if found.newer:
        told.append(
            f"{_counted(len(found.newer), 'trial was', 'trials were')} written by a newer flopwatch (format "
            f"{max(found.newer.values())}) and left alone: {_some(list(found.newer))}; update flopwatch to read them"
        )
    if found.broken_lines:
        numbers = _some([str(number) for number in found.broken_lines])
        told.append(
            f"{_counted(len(found.broken_lines), 'line', 'lines')} of {RESULTS} cannot be read ({numbers}); "
            "the trials' own files were read instead"
        )
    if found.list_trouble:
        told.append(f"{RESULTS} cannot be read: {found.list_trouble}; the trials' own files were read instead")
    if found.trial_list.newer_format is not None:
        told.append(
            f"{SWEEP} was written by a newer flopwatch (format {found.trial_list.newer_format}); update flopwatch"
        )
    elif found.trial_list.trouble:
        told.append(f"{SWEEP} is damaged: {found.trial_list.trouble}; trials that have not run may be missing here")
    return tuple(told)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
