"""Compare two sweeps: pair their trials, compute the ratios B / A of each pair, and list what differs.

Trials are paired by their configuration; the machine on which they ran does not matter.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from flopwatch.records.trial import MemoryUse, TrialResult, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.cells import MOST_FINITE, epsilon_text, make_cell, trainer_name
from flopwatch.report.problems import counted_values, denominators, environment_facts
from flopwatch.report.records import TrialCell
from flopwatch.report.verdicts import MEMORY_NOISE, TIME_NOISE, rate_interval, ratio_interval, time_interval
from flopwatch.stats import differ
from flopwatch.text import one_line, plural

Quantity: TypeAlias = Literal["time", "samples_per_s", "memory", "mfu"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One quantity of a trial that is in both sweeps, and its ratio.

    Attributes:
        a: Value in sweep A: median step time in seconds, samples per second, peak bytes, or MFU as a fraction.
        b: Value in sweep B.
        ratio: b / a.
        low: Lowest ratio within the 95 % intervals of both values; None for memory and with fewer than 6 steps.
        high: Highest ratio within the 95 % intervals of both values; None in the same cases.
        verdict: `better` or `worse` if the intervals do not overlap even when both are widened by 2 %, because two runs
            of the same trial may differ that much. For memory: if the peaks differ by more than 1 %. Otherwise
            `no measurable difference` or `too few steps`.
    """

    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting, version or device that differs between the sweeps. A value is None if it is unknown.

    Attributes:
        what: Name of the setting, such as `dtype`; `a` and `b` are its values in sweep A and B.
    """

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class TrialPair:
    """A trial of sweep A and the trial of sweep B with the same configuration.

    Attributes:
        trial: Name of the trial in A; `trial_b` is its name in B.
        outcome_a: Outcome in A; `missing` if the trial has no result. `outcome_b` is the outcome in B.
        reason_a: Why the trial ended in A, in one line; `reason_b` is the reason in B.
        ratios: The ratio of each quantity; empty unless both trials are `ok`.
        differences: Settings that differ between these two trials, except those in `SweepComparison.settings`, if the
            trials were paired by their names; and `epsilon`, if both have one and it differs.
        is_unstable: True if the 95 % interval of one of the step times is wider than 5 % of the median. The usual
            cause is another program on the same machine.
    """

    trial: str
    trial_b: str
    trainer: str
    outcome_a: str
    outcome_b: str
    reason_a: str
    reason_b: str
    ratios: Mapping[Quantity, Ratio]
    differences: tuple[Difference, ...] = ()
    is_unstable: bool = False


@dataclass(frozen=True, slots=True)
class Overall:
    """One quantity over many pairs of trials.

    Attributes:
        pairs: Number of pairs in which both values are known.
        mean_ratio: Geometric mean of b / a.
        better: Number of pairs in which B is measurably better.
        worse: Number of pairs in which B is measurably worse.
        undecided: Number of pairs without a measurable difference, or with too few steps for a verdict.
    """

    pairs: int
    mean_ratio: float
    better: int
    worse: int
    undecided: int


@dataclass(frozen=True, slots=True)
class Side:
    folder: str
    trials: int
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """The comparison of sweep A (before a change) with sweep B (after it).

    Attributes:
        settings: Settings with one value in all trials of A and another value in all trials of B. Trials that differ
            only in these are still paired.
        environment: Versions, devices, hosts and peaks that differ between the trials of the pairs.
        pairs: Trials with the same configuration in both sweeps, in the order of A.
        overall: The mean ratio of each quantity over all pairs.
        by_trainer: The mean ratio of each quantity for each trainer.
        only_a: Names of trials whose configuration is not in B.
        only_b: Names of trials whose configuration is not in A.
        notes: What readers must know before they use the numbers.
    """

    a: Side
    b: Side
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    pairs: tuple[TrialPair, ...]
    overall: Mapping[Quantity, Overall]
    by_trainer: Mapping[str, Mapping[Quantity, Overall]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


_SIZES = ("model", "batch_size", "seq_len")
"""Trials that differ in one of these settings are never paired, because they do different work."""
_NO_SETTINGS = ("label", "trace", "limits", "options")
_LONGEST_VALUE = 300
_PEAK = "peak of MFU"
_EPSILON = "epsilon"
_NO_PAIRS = "no configuration is in both sweeps; settings without a common value"
_OTHER_PEAKS = "MFU in A and MFU in B are shares of different peaks, so they are not comparable"
_json = json.JSONEncoder(sort_keys=True, default=str).encode


class _Entry:
    """A planned trial of one sweep, with each setting that affects a measurement as JSON text."""

    def __init__(self, name: str, spec: TrialSpec, result: TrialResult | None) -> None:
        self.name, self.spec, self.result = name, spec, result
        self.outcome = str(result.outcome) if result else "missing"
        found = {one.name: getattr(spec, one.name) for one in fields(spec) if one.name not in _NO_SETTINGS}
        found["memory_bytes"] = spec.limits.memory_bytes
        found |= {f"options.{name}": value for name, value in spec.options.items()}
        self.settings = {name: _json(value) for name, value in found.items()}


def compare_sweeps(a: Capture, b: Capture) -> SweepComparison:
    """Compare sweep B with sweep A: the ratios of all paired trials, and the differences between the sweeps.

    A setting such as `dtype` may have one value in all trials of A and another value in all trials of B. Such a setting
    was changed on purpose: pairing ignores it, and `SweepComparison.settings` lists it.
    """
    in_a, in_b = ([_Entry(*trial) for trial in sweep.trials()] for sweep in (a, b))
    values = {
        name: ({entry.settings.get(name) for entry in in_a}, {entry.settings.get(name) for entry in in_b})
        for name in dict.fromkeys(name for entry in (*in_a, *in_b) for name in entry.settings)
    }
    changed = {
        name: (*of_a, *of_b)
        for name, (of_a, of_b) in values.items()
        if name not in _SIZES and len(of_a) == len(of_b) == 1 and of_a != of_b
    }
    pairing = _paired(in_a, in_b, [name for name in values if name not in changed])
    pairs = tuple(_pair(one, pairing[one], changed) for one in in_a if one in pairing)
    sides = [
        Side(str(sweep.folder), len(members), Counter(entry.outcome for entry in members))
        for sweep, members in ((a, in_a), (b, in_b))
    ]
    unshared = [one_line(name) for name, (of_a, of_b) in values.items() if not of_a & of_b]
    results = ([entry.result for entry in side if entry.result] for side in (pairing.keys(), pairing.values()))
    environment = tuple(_environment_differences(*results))
    trainers, taken = dict.fromkeys(pair.trainer for pair in pairs if pair.ratios), set(pairing.values())
    return SweepComparison(
        a=sides[0],
        b=sides[1],
        settings=tuple(Difference(name, *map(_shown, both)) for name, both in changed.items()),
        environment=environment,
        pairs=pairs,
        overall=overall(pairs),
        by_trainer={name: overall([pair for pair in pairs if pair.trainer == name]) for name in trainers},
        only_a=tuple(entry.name for entry in in_a if entry not in pairing),
        only_b=tuple(entry.name for entry in in_b if entry not in taken),
        notes=(
            *(f"{side}: {one_line(trouble)}" for side, one in (("A", a), ("B", b)) for trouble in one.troubles),
            *(f"{side} has no trials" for side, members in (("A", in_a), ("B", in_b)) if not members),
            *([f"{_NO_PAIRS}: {', '.join(unshared) or 'none'}"] if in_a and in_b and not pairs else []),
            *(_pair_notes(pairing, pairs) if pairs else ()),
            *(_OTHER_PEAKS for difference in environment if difference.what == _PEAK),
        ),
    )


def _shown(value: str | None) -> str | None:
    """Convert a JSON value for display: text loses its quotes, and null becomes None."""
    if value is None or value == "null":
        return None
    content = json.loads(value)
    return one_line(content if isinstance(content, str) else value, _LONGEST_VALUE)


def _paired(a: Sequence[_Entry], b: Sequence[_Entry], names: Sequence[str]) -> dict[_Entry, _Entry]:
    """TrialPair trials with equal settings, and pair the remaining trials if their names and sizes are equal."""
    found = _matched(a, b, lambda entry: tuple(entry.settings.get(name) for name in names))
    taken = set(found.values())
    left = [entry for entry in a if entry not in found], [entry for entry in b if entry not in taken]
    return found | _matched(*left, lambda entry: (entry.name, *(entry.settings.get(name) for name in _SIZES)))


def _matched(a: Sequence[_Entry], b: Sequence[_Entry], key: Callable[[_Entry], Any]) -> dict[_Entry, _Entry]:
    """TrialPair trials with equal keys, each trial at most once and first those with equal names."""
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


def _pair(one: _Entry, other: _Entry, changed: Iterable[str]) -> TrialPair:
    a, b = one.result, other.result
    found: dict[Quantity, Ratio] = {}
    spent: list[str] = []
    if a and b and a.outcome == b.outcome == "ok":
        cells = [make_cell(entry.name, entry.spec, entry.result, "") for entry in (one, other)]
        found, spent = ratios(*cells), [epsilon_text(cell.epsilon) for cell in cells if cell.epsilon is not None]
        if memory_kind(a.measured.memory) != memory_kind(b.measured.memory):
            found.pop("memory", None)
    own = [
        Difference(name, _shown(one.settings.get(name)), _shown(other.settings.get(name)))
        for name in dict.fromkeys([*one.settings, *other.settings])
        if name not in changed and one.settings.get(name) != other.settings.get(name)
    ]
    return TrialPair(
        one.name,
        other.name,
        trainer_name(one.spec),
        one.outcome,
        other.outcome,
        a.reason if a else "",
        b.reason if b else "",
        found,
        (*own, *([Difference(_EPSILON, *spent)] if len(set(spent)) == 2 else [])),
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


def _environment_differences(a: Sequence[TrialResult], b: Sequence[TrialResult]) -> Iterator[Difference]:
    """Yield the versions, devices, hosts, user files and peak FLOP/s that differ between these trials of A and B.

    If there are several values on one side, each is followed by its number of trials.
    """
    in_a, in_b = _facts(a), _facts(b)
    for name in dict.fromkeys([*in_a, *in_b]):
        if set(in_a.get(name, ())) != set(in_b.get(name, ())):
            yield Difference(one_line(name), *(_values(facts.get(name, Counter())) for facts in (in_a, in_b)))


def _facts(results: Sequence[TrialResult]) -> dict[str, Counter[str]]:
    peaks = denominators(results)
    return environment_facts(results) | ({_PEAK: Counter(peaks)} if peaks else {})


def _values(counts: Counter[str]) -> str | None:
    counts = Counter({one_line(value, _LONGEST_VALUE): amount for value, amount in counts.items()})
    return next(iter(counts), None) if len(counts) <= 1 else counted_values(counts)


def _pair_notes(pairing: Mapping[_Entry, _Entry], pairs: Sequence[TrialPair]) -> Iterator[str]:
    ran = [(one.result, other.result) for one, other in pairing.items() if one.outcome == other.outcome == "ok"]
    if unlike := sum(len({memory_kind(result.measured.memory) for result in pair if result}) > 1 for pair in ran):
        yield f"memory of {plural(unlike, 'pair')} is not compared: A and B measured different kinds of memory"
    if not any(pair.ratios for pair in pairs):
        yield "no configuration ran to its end in both sweeps, so there are no ratios"
    if unstable := sum(pair.is_unstable and "time" in pair.ratios for pair in pairs):
        yield (
            f"the times of {plural(unstable, 'pair')} are unstable (~), probably because the machine was busy, "
            "which may also explain measurable differences: measure these trials again on an idle machine"
        )
    if by_name := sum(any(one.what != _EPSILON for one in pair.differences) for pair in pairs):
        yield f"the trials of {plural(by_name, 'pair')} have the same name and size but differ in other settings"


QUANTITIES: tuple[Quantity, ...] = ("time", "samples_per_s", "memory", "mfu")


def ratios(a: TrialCell, b: TrialCell) -> dict[Quantity, Ratio]:
    found: dict[Quantity, Ratio] = {}
    for quantity in QUANTITIES:
        (one, interval), (other, other_interval) = _figure(a, quantity), _figure(b, quantity)
        if one and other and 0 < (ratio := other / one) <= MOST_FINITE:
            bounds = ratio_interval(interval, other_interval)
            low, high = bounds or (None, None)
            words = ("better", "worse") if quantity in ("time", "memory") else ("worse", "better")
            compared = ((ratio, ratio), MEMORY_NOISE) if quantity == "memory" else (bounds, TIME_NOISE)
            found[quantity] = Ratio(one, other, ratio, low, high, differ(*compared, *words))
    return found


def _figure(cell: TrialCell, quantity: Quantity) -> tuple[float | None, tuple[float, float] | None]:
    if quantity == "time":
        return cell.seconds, time_interval(cell)
    if quantity == "memory":
        return cell.peak_bytes, None
    if quantity == "samples_per_s":
        return cell.samples_per_s, rate_interval(cell, cell.samples_per_s)
    # The ratio of two lower bounds says nothing about the ratio of the true values.
    return None if cell.is_lower_bound else cell.mfu, rate_interval(cell, cell.mfu)


def overall(pairs: Sequence[TrialPair]) -> dict[Quantity, Overall]:
    found = {}
    for quantity in QUANTITIES:
        if known := [pair.ratios[quantity] for pair in pairs if quantity in pair.ratios]:
            better, worse = (sum(one.verdict == verdict for one in known) for verdict in ("better", "worse"))
            mean = math.exp(math.fsum(math.log(one.ratio) for one in known) / len(known))
            found[quantity] = Overall(len(known), mean, better, worse, len(known) - better - worse)
    return found
