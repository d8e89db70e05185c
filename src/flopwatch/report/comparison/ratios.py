"""The records of a comparison of sweep A with sweep B, and the computation of ratios B / A and their verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.records import Cell
from flopwatch.report.verdicts import MEMORY_NOISE, TIME_NOISE, rate_interval, ratio_interval, time_interval
from flopwatch.stats import differ

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
class Pair:
    """A trial of sweep A and the trial of sweep B with the same configuration.

    Attributes:
        trial: Name of the trial in A; `trial_b` is its name in B.
        outcome_a: Outcome in A; `missing` if the trial has no result. `outcome_b` is the outcome in B.
        reason_a: Why the trial ended in A, in one line; `reason_b` is the reason in B.
        ratios: The ratio of each quantity; empty unless both trials are `ok`.
        differences: Settings that differ between these two trials, except those in `SweepComparison.settings`. Empty
            unless the trials were paired by their names.
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
    """One of the two sweeps: its folder, the number of planned trials, and the number of trials by outcome."""

    folder: str
    trials: int
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """The comparison of sweep A (before a change) with sweep B (after it).

    Attributes:
        settings: Settings with one value in all trials of A and another value in all trials of B. Trials that differ
            only in these are still paired.
        environment: Versions, devices and hosts that differ.
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
    pairs: tuple[Pair, ...]
    overall: Mapping[Quantity, Overall]
    by_trainer: Mapping[str, Mapping[Quantity, Overall]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    notes: tuple[str, ...]


QUANTITIES: tuple[Quantity, ...] = ("time", "samples_per_s", "memory", "mfu")


def ratios(a: Cell, b: Cell) -> dict[Quantity, Ratio]:
    """Return the ratios of two `ok` trials, for each quantity that was measured in both."""
    found: dict[Quantity, Ratio] = {}
    for quantity in QUANTITIES:
        (one, interval), (other, other_interval) = _figure(a, quantity), _figure(b, quantity)
        if not one or not other or not 0 < other / one <= MOST_FINITE:
            continue
        ratio, bounds = other / one, ratio_interval(interval, other_interval)
        words = ("better", "worse") if quantity in ("time", "memory") else ("worse", "better")
        if quantity == "memory":
            verdict = differ((ratio, ratio), MEMORY_NOISE, *words)
        else:
            verdict = differ(bounds, TIME_NOISE, *words)
        low, high = bounds or (None, None)
        found[quantity] = Ratio(one, other, ratio, low, high, verdict)
    return found


def _figure(cell: Cell, quantity: Quantity) -> tuple[float | None, tuple[float, float] | None]:
    """Return the value and its 95 % interval."""
    if quantity == "time":
        return cell.seconds, time_interval(cell)
    if quantity == "memory":
        return cell.peak_bytes, None
    if quantity == "samples_per_s":
        return cell.samples_per_s, rate_interval(cell, cell.samples_per_s)
    # The ratio of two lower bounds says nothing about the ratio of the true values.
    return None if cell.is_lower_bound else cell.mfu, rate_interval(cell, cell.mfu)


def overall(pairs: Sequence[Pair]) -> dict[Quantity, Overall]:
    found = {}
    for quantity in QUANTITIES:
        if known := [pair.ratios[quantity] for pair in pairs if quantity in pair.ratios]:
            better, worse = (sum(one.verdict == verdict for one in known) for verdict in ("better", "worse"))
            mean = math.exp(math.fsum(math.log(one.ratio) for one in known) / len(known))
            found[quantity] = Overall(len(known), mean, better, worse, len(known) - better - worse)
    return found
