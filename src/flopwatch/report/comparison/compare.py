"""Compare two sweeps: pair their trials, compute the ratios of each pair, and list what differs.

Trials are paired by their configuration; the machine on which they ran does not matter.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from flopwatch.records.trial import MemoryUse, TrialResult, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.cells import make_cell, trainer_name
from flopwatch.report.comparison.ratios import Difference, Pair, Side, SweepComparison, overall, ratios
from flopwatch.report.problems import counted_values, denominators, environment_facts
from flopwatch.text import one_line, plural

SIZES = ("model", "batch_size", "seq_len")
"""Trials that differ in one of these settings are never paired, because they do different work."""
_NO_SETTINGS = ("label", "trace", "limits", "options")

_LONGEST_VALUE = 300
_PEAK = "peak of MFU"
_OTHER_PEAKS = "MFU in A and MFU in B are shares of different peaks, so they are not comparable"


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A planned trial of one sweep. `result` is None if the trial has not ended.

    `settings` has each setting of the configuration as JSON text; an option is named `options.NAME`.
    """

    name: str
    spec: TrialSpec
    result: TrialResult | None
    settings: Mapping[str, str]

    @property
    def outcome(self) -> str:
        return str(self.result.outcome) if self.result else "missing"


def compare_sweeps(a: Capture, b: Capture) -> SweepComparison:
    """Compare sweep B with sweep A: the ratios of all paired trials, and the differences between the sweeps.

    A setting such as `dtype` may have one value in all trials of A and another value in all trials of B. Such a setting
    was changed on purpose: pairing ignores it, and `SweepComparison.settings` lists it.
    """
    in_a, in_b = _entries(a), _entries(b)
    values = _setting_values(in_a, in_b)
    changed = {
        name: (*of_a, *of_b)
        for name, (of_a, of_b) in values.items()
        if name not in SIZES and len(of_a) == len(of_b) == 1 and of_a != of_b
    }
    pairing = _paired(in_a, in_b, [name for name in values if name not in changed])
    pairs = tuple(_pair(one, pairing[one], changed) for one in in_a if one in pairing)
    environment = _environment_differences(a.results.values(), b.results.values())
    trainers, taken = dict.fromkeys(pair.trainer for pair in pairs if pair.ratios), set(pairing.values())
    return SweepComparison(
        a=_side(a, in_a),
        b=_side(b, in_b),
        settings=tuple(Difference(name, *map(_shown, both)) for name, both in changed.items()),
        environment=environment,
        pairs=pairs,
        overall=overall(pairs),
        by_trainer={name: overall([pair for pair in pairs if pair.trainer == name]) for name in trainers},
        only_a=tuple(entry.name for entry in in_a if entry not in pairing),
        only_b=tuple(entry.name for entry in in_b if entry not in taken),
        notes=(
            *(f"{side}: {one_line(trouble)}" for side, one in (("A", a), ("B", b)) for trouble in one.troubles),
            *_memory_notes(pairing),
            *(f"{side} has no trials" for side, members in (("A", in_a), ("B", in_b)) if not members),
            *(_no_pairs_note(values) if in_a and in_b and not pairs else _pair_notes(pairs)),
            *(_OTHER_PEAKS for difference in environment if difference.what == _PEAK),
        ),
    )


def _side(capture: Capture, members: Sequence[_Entry]) -> Side:
    return Side(str(capture.folder), len(members), Counter(entry.outcome for entry in members))


def _entries(capture: Capture) -> list[_Entry]:
    return [_Entry(name, spec, result, _settings(spec)) for name, spec, result in capture.trials()]


def _settings(spec: TrialSpec) -> dict[str, str]:
    """Return the settings that affect a measurement, as JSON text."""
    found = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NO_SETTINGS}
    found["memory_bytes"] = spec.limits.memory_bytes
    found |= {f"options.{name}": value for name, value in spec.options.items()}
    return {
        name: _json(value) if isinstance(value, Hashable) else _json.__wrapped__(value) for name, value in found.items()
    }


@lru_cache(maxsize=4096, typed=True)  # Without `typed`, True, 1 and 1.0 would share one cache entry.
def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value: str | None) -> str | None:
    """Convert a JSON value for display: text loses its quotes, and null becomes None."""
    if value is None or value == "null":
        return None
    content = json.loads(value)
    return one_line(content if isinstance(content, str) else value, _LONGEST_VALUE)


def _setting_values(a: Sequence[_Entry], b: Sequence[_Entry]) -> dict[str, tuple[set[str | None], set[str | None]]]:
    return {
        name: ({entry.settings.get(name) for entry in a}, {entry.settings.get(name) for entry in b})
        for name in dict.fromkeys(name for entry in (*a, *b) for name in entry.settings)
    }


def _paired(a: Sequence[_Entry], b: Sequence[_Entry], names: Sequence[str]) -> dict[_Entry, _Entry]:
    """Pair trials with equal settings, and pair the remaining trials if their names and sizes are equal."""
    found = _matched(a, b, lambda entry: tuple(entry.settings.get(name) for name in names))
    taken = set(found.values())
    left = [entry for entry in a if entry not in found], [entry for entry in b if entry not in taken]
    return found | _matched(*left, lambda entry: (entry.name, *(entry.settings.get(name) for name in SIZES)))


def _matched(a: Sequence[_Entry], b: Sequence[_Entry], key: Callable[[_Entry], Any]) -> dict[_Entry, _Entry]:
    """Pair trials with equal keys, each trial at most once and first those with equal names."""
    waiting: dict[Any, list[_Entry]] = defaultdict(list)
    for entry in b:
        waiting[key(entry)].append(entry)
    found: dict[_Entry, _Entry] = {}
    for needs_name in (True, False):
        for one in a:
            there = waiting[key(one)] if one not in found else []
            other = next((other for other in there if other.name == one.name or not needs_name), None)
            if other is not None:
                there.remove(other)
                found[one] = other
    return found


def _pair(one: _Entry, other: _Entry, changed: Iterable[str]) -> Pair:
    a, b = one.result, other.result
    found = {}
    if a and b and a.outcome == b.outcome == "ok":
        found = ratios(*(make_cell(entry.name, entry.spec, entry.result, "") for entry in (one, other)))
        if memory_kind(a.measured.memory) != memory_kind(b.measured.memory):
            found.pop("memory", None)
    return Pair(
        one.name,
        other.name,
        trainer_name(one.spec),
        one.outcome,
        other.outcome,
        a.reason if a else "",
        b.reason if b else "",
        found,
        tuple(
            Difference(name, _shown(one.settings.get(name)), _shown(other.settings.get(name)))
            for name in dict.fromkeys([*one.settings, *other.settings])
            if name not in changed and one.settings.get(name) != other.settings.get(name)
        ),
        is_unstable=any(
            result is not None and result.outcome == "ok" and (steps := result.measured.steps) and steps.unstable
            for result in (a, b)
        ),
    )


def memory_kind(memory: MemoryUse) -> str:
    """Return which kind of memory the peak is, because different kinds cannot be compared.

    `resident` is host memory in which pages shared by several processes are counted for each process.

    >>> memory_kind(MemoryUse(reserved_bytes=1)), memory_kind(MemoryUse(host_bytes=1, host_method="rss"))
    ('reserved on the accelerator', 'resident')
    """
    if memory.reserved_bytes is not None:
        return "reserved on the accelerator"
    return "resident" if memory.host_method == "rss" else "host memory, each page once"


def _environment_differences(a: Iterable[TrialResult], b: Iterable[TrialResult]) -> tuple[Difference, ...]:
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
    return environment_facts(results) | ({_PEAK: Counter(peaks)} if peaks else {})


def _values(counts: Counter[str]) -> str | None:
    counts = Counter({one_line(value, _LONGEST_VALUE): amount for value, amount in counts.items()})
    return next(iter(counts), None) if len(counts) <= 1 else counted_values(counts)


def _memory_notes(pairing: Mapping[_Entry, _Entry]) -> Iterator[str]:
    ran = [(one.result, other.result) for one, other in pairing.items() if one.outcome == other.outcome == "ok"]
    unlike = sum(len({memory_kind(result.measured.memory) for result in pair if result}) > 1 for pair in ran)
    if unlike:
        yield f"memory of {plural(unlike, 'pair')} is not compared: A and B measured different kinds of memory"


def _no_pairs_note(values: Mapping[str, tuple[set[str | None], set[str | None]]]) -> Iterator[str]:
    apart = ", ".join(one_line(name) for name, (of_a, of_b) in values.items() if not of_a & of_b) or "none"
    yield f"no configuration is in both sweeps; settings without a common value: {apart}"


def _pair_notes(pairs: Sequence[Pair]) -> Iterator[str]:
    if pairs and not any(pair.ratios for pair in pairs):
        yield "no configuration ran to its end in both sweeps, so there are no ratios"
    if unstable := sum(pair.is_unstable and "time" in pair.ratios for pair in pairs):
        yield (
            f"the times of {plural(unstable, 'pair')} are unstable (~), probably because the machine was busy, "
            "which may also explain measurable differences: measure these trials again on an idle machine"
        )
    if by_name := sum(bool(pair.differences) for pair in pairs):
        yield f"the trials of {plural(by_name, 'pair')} have the same name and size but differ in other settings"
