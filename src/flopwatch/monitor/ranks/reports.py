"""The report that a rank sends once per logging window: sums, extremes and the rank of each extreme, as JSON.

Sums are integers of any size, because the FLOPs of a window of 16,384 ranks can exceed 64 bits.
"""

import json
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import starmap
from statistics import fmean
from typing import Any, NamedTuple

from flopwatch.monitor.counters.values import ENERGY, OF_RANKS
from flopwatch.monitor.measured_step import AMOUNTS, MeasuredStep, input_wait_share, seconds_of
from flopwatch.records.counters import CounterWindow
from flopwatch.records.run import Number

RATED = AMOUNTS[:4]
"""Amounts that are also logged per second."""
MOST_WAITING = 64
"""The maximum number of reports that wait to be sent or read; each further report is joined with the last one."""


class RankDoubt(NamedTuple):
    """The first step that was called exact and is doubted now, and the rank whose count has shown it."""

    first_step: int
    rank: int


def earliest(*doubts: RankDoubt | None) -> RankDoubt | None:
    return min((doubt for doubt in doubts if doubt is not None), default=None)


class Amount(NamedTuple):
    """A sum over ranks, and how many ranks contributed to it."""

    total: int = 0
    ranks: int = 0

    def __add__(self, other: "Amount") -> "Amount":  # type: ignore[override]
        return Amount(self.total + other.total, self.ranks + other.ranks)


class Extreme(NamedTuple):
    """The largest or smallest value of all ranks, and the rank that has it."""

    rank: int
    value: float


_NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class RankReport:
    """One window of one rank, or the merged windows of several ranks. Steps and times are summed over ranks.

    Attributes:
        totals: Amounts of all steps, in the order of `AMOUNTS`.
        timed: Amounts of the timed steps: those that have a time and are not warm-up.
        seconds: Time of the timed steps.
        input_wait: The part of `seconds` spent waiting for batches, in nanoseconds.
        known_seconds: For each amount in `RATED`, the time of the timed steps in which it is known.
        batch_steps: Number of steps, timed or not, whose batch is known.
        counted_steps: Number of steps, timed or not, whose FLOPs are known.
        counted_seconds: Time of the timed steps whose FLOPs are known.
        capacity_flops: FLOPs of the devices at their peak in `counted_seconds`; None if a peak is unknown.
        longest_wait: The largest share of step time that a rank has spent waiting for batches.
        longest_own, shortest_own: The mean time of steps outside of their backward passes, in which ranks wait for each
            other; None where it is unknown.
        exact_ranks: Number of ranks on which the FLOPs of all steps are exact.
        counters: Sum and number of ranks for each metric of hardware counters that a rank has, by its key.
    """

    first_step: int
    last_step: int
    ranks: int = 1
    totals: tuple[Amount, ...] = (_NOTHING,) * len(AMOUNTS)
    timed: tuple[Amount, ...] = (_NOTHING,) * len(AMOUNTS)
    timed_steps: int = 0
    seconds: float = 0.0
    input_wait: Amount = _NOTHING
    known_seconds: tuple[float, ...] = (0.0,) * len(RATED)
    batch_steps: int = 0
    counted_steps: int = 0
    counted_seconds: float = 0.0
    capacity_flops: float | None = 0.0
    longest_wait: Extreme | None = None
    longest_own: Extreme | None = None
    shortest_own: Extreme | None = None
    exact_ranks: int = 0
    counters: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def total(self, name: str) -> Amount:
        return self.totals[AMOUNTS.index(name)]

    def timed_total(self, name: str) -> Amount:
        return self.timed[AMOUNTS.index(name)]


_FIELDS = tuple(field.name for field in fields(RankReport))
_SUMS = (
    *("ranks", "timed_steps", "seconds", "input_wait", "batch_steps", "counted_steps", "counted_seconds"),
    "exact_ranks",
)
_OF_LATER = ("ranks", "longest_wait", "longest_own", "shortest_own")


def _report_from_json(values: list[Any]) -> RankReport:
    """The report with these fields, in which JSON has turned tuples into lists."""
    read = RankReport(*values)
    return replace(
        read,
        totals=tuple(starmap(Amount, read.totals)),
        timed=tuple(starmap(Amount, read.timed)),
        input_wait=Amount(*read.input_wait),
        known_seconds=tuple(read.known_seconds),
        longest_wait=read.longest_wait and Extreme(*read.longest_wait),
        longest_own=read.longest_own and Extreme(*read.longest_own),
        shortest_own=read.shortest_own and Extreme(*read.shortest_own),
        counters={key: (total, ranks) for key, (total, ranks) in read.counters.items()},
    )


class Message(NamedTuple):
    """What a rank writes for the rank above it.

    Attributes:
        reports: Its reports since the last message, each merged with those of the ranks below it.
        doubt: What it and the ranks below it doubt since the last message, also of earlier windows.
        is_last: True if no further message will come.
    """

    reports: list[RankReport]
    doubt: RankDoubt | None
    is_last: bool

    def followed_by(self, later: "Message") -> "Message":
        reports = list(self.reports)
        for report in later.reports:
            add_to_queue(reports, report)
        return Message(reports, earliest(self.doubt, later.doubt), later.is_last)

    def to_json(self) -> str:
        reports = [[getattr(report, name) for name in _FIELDS] for report in self.reports]
        return json.dumps([reports, self.doubt, self.is_last], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Message":
        reports, doubt, is_last = json.loads(text)
        return cls([*map(_report_from_json, reports)], doubt and RankDoubt(*doubt), is_last)


@dataclass(frozen=True, slots=True)
class Window:
    """The steps of one row, as this rank has measured them.

    Attributes:
        report: What all ranks report of these steps; None until the reports are merged, or if that failed.
        counters: Readings of this rank's hardware counters; `counter_values` are the metrics that follow from them.
    """

    steps: tuple[MeasuredStep, ...]
    report: RankReport | None = None
    counters: tuple[CounterWindow, ...] = ()
    counter_values: Mapping[str, Number] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many ranks have measured these steps, as far as this rank knows."""
        return 1 if self.report is None else self.report.ranks


def report_of(
    rank: int,
    steps: Sequence[MeasuredStep],
    *,
    peak_flops_per_s: float | None,
    waits_in_forward: bool = False,
    counter_values: Mapping[str, Number] | None = None,
) -> RankReport:
    """Make the report of one rank's window. `waits_in_forward`: forward passes may wait for other ranks.

    >>> steps = [MeasuredStep(4, seconds=0.5, tokens=100), MeasuredStep(5, seconds=0.5, tokens=120)]
    >>> report_of(3, steps, peak_flops_per_s=None).total("tokens")
    Amount(total=220, ranks=1)
    """
    timed = [step for step in steps if step.seconds is not None and not step.is_warm_up]
    seconds = seconds_of(timed)
    waiting = input_wait_share(timed)  # steps with an unknown wait are assumed to wait as long as the others
    # MFU uses only steps with known FLOPs. If a rank, such as a pipeline stage, has none, all its timed steps are used.
    counted = [step.seconds or 0.0 for step in timed if step.model_flops is not None]
    counted_seconds = sum(counted) if counted else seconds
    own = None if waits_in_forward else _own_seconds(timed)
    return RankReport(
        steps[0].step,
        steps[-1].step,
        totals=tuple(_amount(steps, name) for name in AMOUNTS),
        timed=tuple(_amount(timed, name) for name in AMOUNTS),
        timed_steps=len(timed),
        seconds=seconds,
        input_wait=Amount() if waiting is None else Amount(round(waiting * seconds * 1e9), 1),
        known_seconds=tuple(float(seconds_of(s for s in timed if getattr(s, name) is not None)) for name in RATED),
        batch_steps=sum(step.samples is not None or step.model_flops is not None for step in steps),
        counted_steps=sum(step.model_flops is not None for step in steps),
        counted_seconds=counted_seconds,
        capacity_flops=None if peak_flops_per_s is None else peak_flops_per_s * counted_seconds,
        longest_wait=None if waiting is None else Extreme(rank, waiting),
        longest_own=None if own is None else Extreme(rank, own),
        shortest_own=None if own is None else Extreme(rank, own),
        exact_ranks=int(all(step.model_flops is not None and step.reason is None for step in steps)),
        counters={key: (value, 1) for key, value in (counter_values or {}).items() if key in OF_RANKS},
    )


def _amount(steps: Sequence[MeasuredStep], name: str) -> Amount:
    known = [amount for step in steps if (amount := getattr(step, name)) is not None]
    return Amount(sum(known), 1) if known else Amount()


def _own_seconds(timed: Sequence[MeasuredStep]) -> float | None:
    """The mean time of the steps without their backward passes; None if these were timed in no step."""
    own = [step.seconds - step.backward_seconds for step in timed if step.seconds and step.backward_seconds is not None]
    return fmean(own) if own else None


def merge(reports: Sequence[RankReport]) -> RankReport:
    """Merge the reports of several ranks on the same logging window."""
    return reduce(_merge_two, reports)


def _merge_two(a: RankReport, b: RankReport) -> RankReport:
    unknown_peak = a.capacity_flops is None or b.capacity_flops is None
    sums: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in _SUMS}
    return RankReport(
        min(a.first_step, b.first_step),
        max(a.last_step, b.last_step),
        totals=tuple(map(Amount.__add__, a.totals, b.totals)),
        timed=tuple(map(Amount.__add__, a.timed, b.timed)),
        known_seconds=tuple(map(float.__add__, a.known_seconds, b.known_seconds)),
        capacity_flops=None if unknown_peak else (a.capacity_flops or 0.0) + (b.capacity_flops or 0.0),
        longest_wait=_extreme(max, a.longest_wait, b.longest_wait),
        longest_own=_extreme(max, a.longest_own, b.longest_own),
        shortest_own=_extreme(min, a.shortest_own, b.shortest_own),
        counters={key: _added(a.counters.get(key), b.counters.get(key)) for key in (*a.counters, *b.counters)},
        **sums,
    )


def _extreme(choose: Callable[..., Extreme | None], *each: Extreme | None) -> Extreme | None:
    return choose((extreme for extreme in each if extreme), key=lambda extreme: extreme.value, default=None)


def _added(a: tuple[float, int] | None, b: tuple[float, int] | None) -> tuple[float, int]:
    (total_a, ranks_a), (total_b, ranks_b) = a or (0.0, 0), b or (0.0, 0)
    return total_a + total_b, ranks_a + ranks_b


def extend(earlier: RankReport, later: RankReport) -> RankReport:
    """Join two consecutive windows of the same ranks; extremes are those of the later window."""
    newest: dict[str, Any] = {name: getattr(later, name) for name in _OF_LATER}
    return replace(
        _merge_two(earlier, later),
        totals=tuple(map(_sum_over_time, earlier.totals, later.totals)),
        timed=tuple(map(_sum_over_time, earlier.timed, later.timed)),
        input_wait=_sum_over_time(earlier.input_wait, later.input_wait),
        **newest,
        exact_ranks=min(earlier.exact_ranks, later.exact_ranks),
        counters=_counters_over_time(earlier, later),
    )


def _counters_over_time(earlier: RankReport, later: RankReport) -> dict[str, tuple[float, int]]:
    """Energy is added, and unknown if that of one window is; the others are means over the time of the steps."""
    a, b, seconds = earlier.counters, later.counters, earlier.seconds + later.seconds
    both = {**a, **b}
    for key in a.keys() & b.keys():
        (before, ranks_before), (after, ranks_after) = a[key], b[key]
        if key == ENERGY:
            both[key] = before + after, min(ranks_before, ranks_after)
        elif ranks_before == ranks_after and seconds:
            both[key] = (before * earlier.seconds + after * later.seconds) / seconds, ranks_after
    if a and b and (ENERGY in a) != (ENERGY in b):  # a window without readings is part of the one after it
        del both[ENERGY]
    return both


def add_to_queue(reports: MutableSequence[RankReport], report: RankReport) -> None:
    """Append a window to earlier ones that wait, or join it with the last of them if these are many."""
    if len(reports) >= MOST_WAITING:
        report = extend(reports.pop(), report)
    reports.append(report)


def _sum_over_time(earlier: Amount, later: Amount) -> Amount:
    return Amount(earlier.total + later.total, max(earlier.ranks, later.ranks))


def aligned(streams: Sequence[Iterator[RankReport]]) -> Iterator[RankReport]:
    """Merge the reports of several ranks: yields one report for every step at which a window ends on all ranks.

    All ranks end windows at the same steps, but a rank can end one early, for a checkpoint that only it writes.
    Its windows are then joined until they end at the same step as those of other ranks. A rank whose reports have
    ended is left out, and so is a window that begins at another step than the first rank's window.
    """
    live = list(streams)
    while heads := [(stream, head) for stream in live if (head := next(stream, None)) is not None]:
        ended: set[int] = set()
        while behind := _behind(heads, ended):
            for index in behind:
                stream, head = heads[index]
                later = next(stream, None)
                if later is None:
                    ended.add(index)
                else:
                    heads[index] = stream, extend(head, later)
        begins = heads[0][1].first_step
        yield merge([head for _, head in heads if head.first_step == begins])
        live = [stream for index, (stream, _) in enumerate(heads) if index not in ended]


def _behind(heads: Sequence[tuple[Iterator[RankReport], RankReport]], ended: set[int]) -> list[int]:
    furthest = max(head.last_step for _, head in heads)
    return [index for index, (_, head) in enumerate(heads) if head.last_step < furthest and index not in ended]
