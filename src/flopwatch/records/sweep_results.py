"""Reads the results in a sweep's folder and lists damaged files. Standard library only; writes nothing.

A result is in `result.json` in the trial's folder, which is authoritative, and in `results.jsonl`, an index to which
the runner appends. Either file may be damaged, missing or outdated; a result that is intact in one is never lost.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flopwatch.decode import BrokenRecordError, read_record
from flopwatch.errors import FlopwatchError, InputError
from flopwatch.files import LineFollower, UnreadableError, line_content, load_json, numbered_lines
from flopwatch.records.trial import FORMAT, UNSETTLED, TrialResult, is_trial_name
from flopwatch.records.trial_files import RESULT, RESULTS, RUNNERS, SPEC, SWEEP, TRIALS
from flopwatch.text import listed, plural

T = TypeVar("T")
_LATEST_UNIX_TIME = 1e11
"""About the year 5138; a larger value is not a time."""


class NewerFormatError(FlopwatchError):
    """A newer flopwatch wrote the record, so this version neither reads nor overwrites it."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"a newer flopwatch wrote this record in format {found}; this one reads up to {FORMAT}: update flopwatch"
        )
        self.format = found


def read_current(kind: type[T], content: Any) -> T:
    """Build a `TrialResult`, or the `TrialJob` in a `spec.json`, from JSON, unless a newer flopwatch wrote it."""
    if not isinstance(content, dict):
        raise BrokenRecordError(f"expected a JSON object, found {type(content).__name__}")
    newer = _newer_format(content)
    if newer is not None:
        raise NewerFormatError(newer)
    return read_record(kind, content)


@dataclass(frozen=True, slots=True)
class TrialList:
    """The content of `sweep.json`: the entries that have a valid name, and in `trouble` why a part cannot be read."""

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
        return TrialList(trouble="the content is not a JSON object")
    engine, created, entries = content.get("engine"), content.get("created"), content.get("trials")
    named = {entry["name"]: entry for entry in entries if _is_named(entry)} if isinstance(entries, list) else {}
    damaged = sum(not _is_named(entry) for entry in entries) if isinstance(entries, list) else None
    return TrialList(
        named,
        engine if isinstance(engine, str) else None,
        float(created) if isinstance(created, int | float) and 0 < created < _LATEST_UNIX_TIME else None,
        "the list of trials is missing" if damaged is None else f"{damaged} entries are damaged" if damaged else "",
        _newer_format(content),
    )


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and is_trial_name(entry["name"])


def _newer_format(content: Mapping[str, Any]) -> int | None:
    found = content.get("format", FORMAT)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > FORMAT else None


def new_results(lines: LineFollower) -> Iterator[TrialResult]:
    """Yield the results that were appended to `results.jsonl` since the last call.

    Lines that are not results are skipped here; `troubles` and the next `flopwatch sweep` in the folder report them.
    """
    for line in lines.poll():
        with contextlib.suppress(BrokenRecordError, NewerFormatError):
            yield read_current(TrialResult, line_content(line))


def read_result(file: Path) -> TrialResult | None:
    with contextlib.suppress(FileNotFoundError, BrokenRecordError, NewerFormatError):
        return _load_result(file)
    return None


def _load_result(file: Path) -> TrialResult:
    try:
        result = read_current(TrialResult, load_json(file))
    except UnreadableError as error:
        raise BrokenRecordError(str(error)) from None
    if result.name != file.parent.name:
        raise BrokenRecordError(f"the file has the result of another trial, {result.name[:80]!r}")
    return result


@dataclass(slots=True)
class SweepResults:
    """The content of a sweep's folder.

    Attributes:
        results: The newest readable result of every trial, by name.
        unlisted: Names of trials whose result is not in `results.jsonl`, because their runner died before writing it.
        damaged: Names of trials whose result cannot be read, with the reason.
        newer: Format of each result that a newer flopwatch wrote, by trial. Such results are not read or overwritten.
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


def gather_results(sweep: Path) -> SweepResults:
    """Read all results that are intact; raises InputError if `sweep` is not the folder of a sweep."""
    if not is_sweep_folder(sweep):
        raise InputError(
            f"{sweep} is not the folder of a sweep: {SWEEP} is missing; pass a folder that `flopwatch sweep` wrote"
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
    """Whether a sweep wrote this folder. If `sweep.json` and `results.jsonl` are lost, the trials' files show it."""
    return any(os.path.lexists(sweep / name) for name in (SWEEP, RESULTS, RUNNERS)) or any(
        os.path.lexists(sweep / TRIALS / name / file) for name in _trial_folders(sweep) for file in (RESULT, SPEC)
    )


def _read_list(file: Path, found: SweepResults) -> set[tuple[str, str, float | None]]:
    attempts: set[tuple[str, str, float | None]] = set()
    try:
        for number, content in numbered_lines(file):
            name = content.get("name") if isinstance(content, dict) else None
            try:
                result = read_current(TrialResult, content)
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
    """Names of trials whose `result.json` may be newer than `results.jsonl`. Opening every `result.json` is slow."""
    try:
        index_changed = (sweep / RESULTS).stat().st_mtime
    except OSError:
        index_changed = 0.0
    if found.broken_lines or found.list_trouble:
        return list(_trial_folders(sweep))
    settled = {name for name, result in found.results.items() if result.outcome not in UNSETTLED}
    return [name for name, changed in _trial_folders(sweep).items() if name not in settled or changed >= index_changed]


def _trial_folders(sweep: Path) -> dict[str, float]:
    folders = {}
    with contextlib.suppress(OSError), os.scandir(sweep / TRIALS) as entries:
        for entry in entries:
            if is_trial_name(entry.name):
                folders[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return folders


def _read_own(sweep: Path, name: str, found: SweepResults, attempts: set[tuple[str, str, float | None]]) -> None:
    try:
        own = _load_result(sweep / TRIALS / name / RESULT)
    except FileNotFoundError:
        return
    except NewerFormatError as error:
        if name not in found.results:
            found.newer[name] = error.format
        return
    except BrokenRecordError as error:
        found.damaged[name] = f"{RESULT}: {error}"
        return
    in_index = found.results.get(name)
    is_known = (name, own.key, own.unix_time) in attempts
    is_better = in_index is not None and in_index.outcome in UNSETTLED and own.outcome not in UNSETTLED
    # Of a repeat that was cancelled or failed, the trial's earlier `ok` runs stay its result.
    is_repeat = any(attempt.get("outcome") == "ok" for attempt in own.earlier_attempts)
    if is_repeat and own.outcome != "ok" and in_index is not None and in_index.outcome == "ok":
        return
    if in_index is None or not is_known or is_better:
        found.results[name] = own
        found.unlisted.append(name)
        found.newer.pop(name, None)


def troubles(found: SweepResults) -> tuple[str, ...]:
    """One sentence for each kind of damage in the folder; empty if all files are intact."""
    sentences = []
    if found.damaged:
        first, why = next(iter(found.damaged.items()))
        trials = f"{plural(len(found.damaged), 'trial')} {'is' if len(found.damaged) == 1 else 'are'} damaged"
        names = f"{listed(list(found.damaged))} ({first}: {why})"
        sentences.append(f"{trials} and counted as missing: {names}; the same sweep runs them again")
    if found.newer:
        trials = f"{plural(len(found.newer), 'trial')} {'was' if len(found.newer) == 1 else 'were'} written by"
        which = f"a newer flopwatch (format {max(found.newer.values())})"
        names = listed(list(found.newer))
        sentences.append(f"{trials} {which} and left alone: {names}; update flopwatch to read them")
    if found.broken_lines:
        numbers = listed([str(number) for number in found.broken_lines])
        sentences.append(
            f"{plural(len(found.broken_lines), 'line')} of {RESULTS} cannot be read ({numbers}); "
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
