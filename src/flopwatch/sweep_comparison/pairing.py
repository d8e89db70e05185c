"""Which trial of one sweep belongs to which of the other: by what was asked for, never by where it ran. Pure."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from flopwatch.plain_text import one_line
from flopwatch.report.capture import Capture
from flopwatch.sweep_comparison.records import Difference
from flopwatch.trial_records import TrialResult, TrialSpec

SIZES = ("model", "batch_size", "seq_len")
"""Trials that differ in these do different work, and are never paired."""
_NO_SETTINGS = ("label", "trace", "limits", "options")

_LONGEST_VALUE = 300


@dataclass(frozen=True, slots=True)
class Entry:
    """Attributes:
    name: Of the trial.
    spec: What was asked for.
    result: How it ended; None while it has not.
    settings: Every setting in JSON, options by `options.NAME`.
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
    """Every trial of the sweep, in the order asked for; then those that wait."""
    found = [Entry(name, result.spec, result, _settings(result.spec)) for name, result in capture.results.items()]
    return found + [Entry(name, spec, None, _settings(spec)) for name, spec in capture.missing.items()]


def paired(a: Sequence[Entry], b: Sequence[Entry]) -> Pairing:
    """By settings, then what is left by name.

    A setting that has one value in all of A and another in all of B was changed on purpose, such as `dtype` or `steps`:
    it is left out and told. A trial of the same name and size whose other settings differ, such as `mine` with another
    class behind it, is the same to whoever named it.
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


def setting_differences(one: Entry, other: Entry, told: Iterable[str]) -> tuple[Difference, ...]:
    """What differs between the two of a pair beyond what is told of both sweeps."""
    known = set(told)
    return tuple(
        Difference(name, _shown(one.settings.get(name)), _shown(other.settings.get(name)))
        for name in _all_names([one, other])
        if name not in known and one.settings.get(name) != other.settings.get(name)
    )


def disjoint_settings(a: Sequence[Entry], b: Sequence[Entry]) -> list[str]:
    """Settings of which the sweeps share no value: why nothing pairs."""
    return [
        name
        for name in _all_names([*a, *b])
        if not {entry.settings.get(name) for entry in a} & {entry.settings.get(name) for entry in b}
    ]


def _settings(spec: TrialSpec) -> dict[str, str]:
    """What changes the measurement. Settings at a default that came later are as good as written down."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NO_SETTINGS}
    found["memory_bytes"] = spec.limits.memory_bytes
    options = spec.options if isinstance(spec.options, Mapping) else {}
    found |= {f"options.{name}": value for name, value in options.items()}
    return {name: _cached_json(value) if _is_scalar(value) else _json(value) for name, value in found.items()}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


@lru_cache(maxsize=4096, typed=True)  # typed: True, 1 and 1.0 are equal, and are three settings
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
    """JSON as a person writes it: text without quotes, nothing for what is not set."""
    if value is None or value == "null":
        return None
    content = json.loads(value)
    return one_line(content if isinstance(content, str) else value, _LONGEST_VALUE)


def _matched(
    a: Sequence[Entry], b: Sequence[Entry], key: Any, *, prefer_names: bool = False
) -> list[tuple[Entry, Entry]]:
    """Equal keys, each entry once; among several of one key the namesakes first."""
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
