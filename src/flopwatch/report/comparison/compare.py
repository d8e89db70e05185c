"""Compare two sweeps: pair their trials, compute the ratios of each pair, and list what differs.

Trials are paired by their configuration; the machine on which they ran does not matter.
"""

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from flopwatch.records.trial import MemoryUse, TrialResult, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.cells import make_cell, trainer_name
from flopwatch.report.comparison.ratios import (
    Difference,
    Overall,
    Pair,
    Quantity,
    Ratio,
    Side,
    SweepComparison,
    overall,
    ratios,
)
from flopwatch.report.problems import counted_values, denominators, environment_facts
from flopwatch.text import one_line, plural

SIZES = ("model", "batch_size", "seq_len")
"""Trials that differ in one of these settings are never paired, because they do different work."""
_NO_SETTINGS = ("label", "trace", "limits", "options")

_LONGEST_VALUE = 300


@dataclass(frozen=True, slots=True)
class Entry:
    """A planned trial of one sweep. `result` is None if the trial has not ended.

    `settings` has each setting of the configuration as JSON text; an option is named `options.NAME`.
    """

    name: str
    spec: TrialSpec
    result: TrialResult | None
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pairing:
    pairs: tuple[tuple[Entry, Entry], ...]
    only_a: tuple[Entry, ...]
    only_b: tuple[Entry, ...]
    differences: tuple[Difference, ...]


def entries(capture: Capture) -> list[Entry]:
    """Return all trials of a sweep in the order of its plan; trials without a result come last."""
    found = [Entry(name, result.spec, result, _settings(result.spec)) for name, result in capture.results.items()]
    return found + [Entry(name, spec, None, _settings(spec)) for name, spec in capture.missing.items()]


def paired(a: Sequence[Entry], b: Sequence[Entry]) -> Pairing:
    """Pair trials with equal settings, and pair the remaining trials if their names and sizes are equal.

    A setting such as `dtype` may have one value in all trials of A and another value in all trials of B. Such a setting
    was changed on purpose: pairing ignores it, and `Pairing.differences` lists it.
    """
    changed = _changed_throughout(a, b)
    names = [name for name in _all_names([*a, *b]) if name not in changed]
    by_settings = _matched(a, b, lambda entry: tuple(entry.settings.get(name) for name in names), prefer_names=True)
    left_a, left_b = _left(a, (one for one, _ in by_settings)), _left(b, (other for _, other in by_settings))
    by_name = _matched(left_a, left_b, lambda entry: (entry.name, *(entry.settings.get(name) for name in SIZES)))
    place = {id(entry): number for number, entry in enumerate(a)}
    pairs = sorted([*by_settings, *by_name], key=lambda pair: place[id(pair[0])])
    return Pairing(
        tuple(pairs),
        tuple(_left(left_a, (one for one, _ in by_name))),
        tuple(_left(left_b, (other for _, other in by_name))),
        tuple(Difference(name, *values) for name, values in changed.items()),
    )


def setting_differences(one: Entry, other: Entry, listed_already: Iterable[str]) -> tuple[Difference, ...]:
    """Return the settings that differ between two paired trials, without those in `listed_already`."""
    known = set(listed_already)
    return tuple(
        Difference(name, _shown(one.settings.get(name)), _shown(other.settings.get(name)))
        for name in _all_names([one, other])
        if name not in known and one.settings.get(name) != other.settings.get(name)
    )


def disjoint_settings(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
    """Return the settings that have no common value in the two sweeps. They explain why no trials can be paired."""
    return [
        name
        for name in _all_names([*a, *b])
        if not {entry.settings.get(name) for entry in a} & {entry.settings.get(name) for entry in b}
    ]


def _settings(spec: TrialSpec) -> dict[str, str]:
    """Return the settings that affect a measurement, as JSON text."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NO_SETTINGS}
    found["memory_bytes"] = spec.limits.memory_bytes
    options = spec.options if isinstance(spec.options, Mapping) else {}
    found |= {f"options.{name}": value for name, value in options.items()}
    return {name: _cached_json(value) if _is_scalar(value) else _json(value) for name, value in found.items()}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


@lru_cache(maxsize=4096, typed=True)  # Without `typed`, True, 1 and 1.0 would share one cache entry.
def _cached_json(value: str | float | None) -> str:
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _all_names(members: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(name for entry in members for name in entry.settings))


def _changed_throughout(a: Sequence[Entry], b: Sequence[Entry]) -> dict[str, tuple[str | None, str | None]]:
    changed = {}
    for name in _all_names([*a, *b]):
        in_a, in_b = {entry.settings.get(name) for entry in a}, {entry.settings.get(name) for entry in b}
        if name not in SIZES and len(in_a) == len(in_b) == 1 and in_a != in_b:
            changed[name] = (_shown(in_a.pop()), _shown(in_b.pop()))
    return changed


def _shown(value: str | None) -> str | None:
    """Convert a JSON value for display: text loses its quotes, and null becomes None."""
    if value is None or value == "null":
        return None
    content = json.loads(value)
    return one_line(content if isinstance(content, str) else value, _LONGEST_VALUE)


def _matched(
    a: Sequence[Entry], b: Sequence[Entry], key: Any, *, prefer_names: bool = False
) -> list[tuple[Entry, Entry]]:
    """Pair trials with equal keys, each trial at most once; with `prefer_names`, first those with equal names."""
    waiting: dict[Any, deque[Entry]] = defaultdict(deque)
    for entry in b:
        waiting[key(entry)].append(entry)
    found, rest = [], []
    for entry in a:
        there = waiting.get(key(entry), deque())
        namesake = next((other for other in there if other.name == entry.name), None) if prefer_names else None
        if namesake is not None:
            there.remove(namesake)
            found.append((entry, namesake))
        elif there:
            rest.append(entry)
    for entry in rest:
        if waiting[key(entry)]:
            found.append((entry, waiting[key(entry)].popleft()))
    return found


def _left(members: Sequence[Entry], taken: Iterable[Entry]) -> list[Entry]:
    gone = {id(entry) for entry in taken}
    return [entry for entry in members if id(entry) not in gone]


def environment_differences(a: Iterable[TrialResult], b: Iterable[TrialResult]) -> tuple[Difference, ...]:
    """Return the versions, devices, hosts, user files and peak FLOP/s that differ between the sweeps.

    If one sweep has several values, each is followed by its number of trials.
    """
    in_a, in_b = _facts(list(a)), _facts(list(b))
    return tuple(
        Difference(one_line(name), _values(in_a.get(name, Counter())), _values(in_b.get(name, Counter())))
        for name in dict.fromkeys([*in_a, *in_b])
        if set(in_a.get(name, ())) != set(in_b.get(name, ()))
    )


def _facts(results: Sequence[TrialResult]) -> dict[str, Counter[str]]:
    peaks = denominators(results)
    return environment_facts(results) | ({"peak of MFU": Counter(peaks)} if peaks else {})


def _values(counts: Counter[str]) -> str | None:
    counts = Counter({one_line(value, _LONGEST_VALUE): amount for value, amount in counts.items()})
    return next(iter(counts), None) if len(counts) <= 1 else counted_values(counts)


def compare_sweeps(a: Capture, b: Capture) -> SweepComparison:
    """Compare sweep B with sweep A: the ratios of all paired trials, and the differences between the sweeps."""
    in_a, in_b = entries(a), entries(b)
    pairing = paired(in_a, in_b)
    changed = [difference.what for difference in pairing.differences]
    pairs = tuple(_pair(one, other, changed) for one, other in pairing.pairs)
    environment = environment_differences(a.results.values(), b.results.values())
    return SweepComparison(
        a=_side(a, in_a),
        b=_side(b, in_b),
        settings=pairing.differences,
        environment=environment,
        pairs=pairs,
        overall=overall(pairs),
        by_trainer=_by_trainer(pairs),
        only_a=tuple(entry.name for entry in pairing.only_a),
        only_b=tuple(entry.name for entry in pairing.only_b),
        notes=(*_troubles(a, b), *_memory_notes(pairing), *_notes(in_a, in_b, pairs, environment)),
    )


def _side(capture: Capture, members: Sequence[Entry]) -> Side:
    return Side(str(capture.folder), len(members), Counter(map(_outcome, members)))


def _pair(one: Entry, other: Entry, changed: Sequence[str]) -> Pair:
    return Pair(
        one.name,
        other.name,
        trainer_name(one.spec),
        _outcome(one),
        _outcome(other),
        one.result.reason if one.result else "",
        other.result.reason if other.result else "",
        _ratios(one, other),
        setting_differences(one, other, changed),
        is_unstable=any(_is_unstable(entry) for entry in (one, other)),
    )


def _is_unstable(entry: Entry) -> bool:
    steps = entry.result.measured.steps if entry.result and _outcome(entry) == "ok" else None
    return steps is not None and steps.unstable


def _ratios(one: Entry, other: Entry) -> Mapping[Quantity, Ratio]:
    if one.result is None or other.result is None or not _outcome(one) == _outcome(other) == "ok":
        return {}
    found = ratios(make_cell(one.result, ""), make_cell(other.result, ""))
    if not _is_memory_alike(one, other):
        found.pop("memory", None)
    return found


def _is_memory_alike(one: Entry, other: Entry) -> bool:
    kinds = [memory_kind(entry.result.measured.memory) for entry in (one, other) if entry.result]
    return len(set(kinds)) <= 1


def memory_kind(memory: MemoryUse) -> str:
    """Return which kind of memory the peak is, because different kinds cannot be compared.

    `resident` is host memory in which pages shared by several processes are counted for each process.

    >>> memory_kind(MemoryUse(reserved_bytes=1)), memory_kind(MemoryUse(host_bytes=1, host_method="rss"))
    ('reserved on the accelerator', 'resident')
    """
    if memory.reserved_bytes is not None:
        return "reserved on the accelerator"
    return "resident" if memory.host_method == "rss" else "host memory, each page once"


def _outcome(entry: Entry) -> str:
    return str(entry.result.outcome) if entry.result else "missing"


def _by_trainer(pairs: Sequence[Pair]) -> dict[str, dict[Quantity, Overall]]:
    members: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.ratios:
            members[pair.trainer].append(pair)
    return {trainer: overall(found) for trainer, found in members.items()}


def _troubles(a: Capture, b: Capture) -> tuple[str, ...]:
    return tuple(f"{side}: {one_line(trouble)}" for side, one in (("A", a), ("B", b)) for trouble in one.troubles)


def _memory_notes(pairing: Pairing) -> tuple[str, ...]:
    both = [pair for pair in pairing.pairs if _outcome(pair[0]) == _outcome(pair[1]) == "ok"]
    unlike = sum(not _is_memory_alike(*pair) for pair in both)
    return (
        (f"memory of {plural(unlike, 'pair')} is not compared: A and B measured different kinds of memory",)
        if unlike
        else ()
    )


def _notes(
    a: Sequence[Entry],
    b: Sequence[Entry],
    pairs: Sequence[Pair],
    environment: Sequence[Difference],
) -> tuple[str, ...]:
    notes = [f"{side} has no trials" for side, members in (("A", a), ("B", b)) if not members]
    if a and b and not pairs:
        apart = ", ".join(one_line(name) for name in disjoint_settings(a, b)) or "none"
        notes.append(f"no configuration is in both sweeps; settings without a common value: {apart}")
    elif pairs and not any(pair.ratios for pair in pairs):
        notes.append("no configuration ran to its end in both sweeps, so there are no ratios")
    if unstable := sum(pair.is_unstable and "time" in pair.ratios for pair in pairs):
        notes.append(
            f"the times of {plural(unstable, 'pair')} are unstable (~), probably because the machine was busy, "
            "which may also explain measurable differences: measure these trials again on an idle machine"
        )
    by_name = sum(bool(pair.differences) for pair in pairs)
    if by_name:
        notes.append(
            f"the trials of {plural(by_name, 'pair')} have the same name and size but differ in other settings"
        )
    if any(difference.what == "peak of MFU" for difference in environment):
        notes.append("MFU in A and MFU in B are shares of different peaks, so they are not comparable")
    return tuple(notes)
