"""The records of a comparison, and the ratio B / A of one quantity with its bounds and verdict. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from flopwatch.report.analysis.cells import MOST_FINITE
from flopwatch.report.analysis.verdicts import MEMORY_RESOLUTION, PROCESS_NOISE, throughput_interval
from flopwatch.report.records import Cell

Quantity: TypeAlias = Literal["time", "samples_per_s", "memory", "mfu"]
Verdict: TypeAlias = Literal["better", "worse", "not told apart", "too few steps"]
"""As in the JSON of format 1; screens and Markdown say "no measurable difference" for `not told apart`."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """One quantity of a pair.

    Attributes:
        a: Seconds of the median step, samples per second, peak bytes, or MFU as a fraction, in A.
        b: The same in B.
        ratio: b / a.
        low: Lower bound of the ratio by the two 95 % intervals; None for memory and below 6 steps.
        high: Upper bound.
        verdict: `better` or `worse` only if the intervals, each widened by the 2 % that two processes differ by, do not
            overlap, or if peaks of memory differ by more than 1 %.
    """

    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting or a fact of the environment that differs.

    Attributes:
        what: Its name.
        a: Its value in A; None when unknown.
        b: Its value in B.
    """

    what: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """One configuration that is in both sweeps.

    Attributes:
        trial: Its name in A.
        trial_b: Its name in B.
        trainer: Name of its trainer in tables.
        outcome_a: Its outcome in A, or `missing`.
        outcome_b: Its outcome in B.
        reason_a: Why it ended in A, in one line.
        reason_b: Why it ended in B.
        ratios: By quantity; empty unless both are `ok`.
        differences: Settings in which only this pair differs, if it was found by name and not by settings.
        is_unstable: The interval of one of the times is wider than 5 % of the median: something disturbed the machine,
            and may have disturbed the other trial differently.
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
    """One quantity over many pairs.

    Attributes:
        pairs: Pairs in which both values are known.
        mean_ratio: Geometric mean of b / a.
        better: Pairs in which B is measurably better.
        worse: Pairs in which B is measurably worse.
        undecided: Pairs without a measurable difference, or with too few steps.
    """

    pairs: int
    mean_ratio: float
    better: int
    worse: int
    undecided: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sweeps.

    Attributes:
        folder: Its folder.
        trials: Planned trials.
        by_outcome: Trials by outcome.
    """

    folder: str
    trials: int
    by_outcome: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SweepComparison:
    """Two sweeps compared.

    Attributes:
        a: The sweep before.
        b: The sweep after.
        settings: Settings that have one value in all of A and another in all of B; pairing ignores them.
        environment: Differences between the environments.
        pairs: Configurations in both, in the order of A.
        overall: By quantity, over all pairs.
        by_trainer: The same for each trainer.
        only_a: Names of trials whose configuration is not in B.
        only_b: Names of trials whose configuration is not in A.
        notes: What readers must know before the numbers.
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

    @property
    def changed_outcomes(self) -> tuple[Pair, ...]:
        """Pairs whose outcome changed."""
        return tuple(pair for pair in self.pairs if pair.outcome_a != pair.outcome_b)


QUANTITIES: tuple[Quantity, ...] = ("time", "samples_per_s", "memory", "mfu")
_MORE_IS_BETTER: Mapping[Quantity, bool] = {"time": False, "samples_per_s": True, "memory": False, "mfu": True}


class _Figure(NamedTuple):
    value: float
    low: float | None = None
    high: float | None = None


def ratios(a: Cell, b: Cell) -> dict[Quantity, Ratio]:
    """The ratios of two `ok` trials, for the quantities that both know."""
    found: dict[Quantity, Ratio] = {}
    for quantity in QUANTITIES:
        one, other = _figure(a, quantity), _figure(b, quantity)
        if one is None or other is None:
            continue
        if quantity == "mfu" and (a.is_lower_bound or b.is_lower_bound):
            continue  # the ratio of two lower bounds is no bound
        ratio = _ratio(one, other, quantity)
        if ratio is not None:
            found[quantity] = ratio
    return found


def overall(pairs: Iterable[Pair]) -> dict[Quantity, Overall]:
    known: dict[Quantity, list[Ratio]] = {}
    for pair in pairs:
        for quantity, ratio in pair.ratios.items():
            known.setdefault(quantity, []).append(ratio)
    return {quantity: _overall(known[quantity]) for quantity in QUANTITIES if quantity in known}


def _overall(found: list[Ratio]) -> Overall:
    verdicts = [ratio.verdict for ratio in found]
    better, worse = verdicts.count("better"), verdicts.count("worse")
    mean = math.exp(math.fsum(math.log(ratio.ratio) for ratio in found) / len(found))
    return Overall(len(found), mean, better, worse, len(found) - better - worse)


def _figure(cell: Cell, quantity: Quantity) -> _Figure | None:
    if quantity == "time" and cell.seconds:
        return _Figure(cell.seconds, cell.low_seconds, cell.high_seconds)
    if quantity == "samples_per_s" and cell.samples_per_s:
        return _Figure(cell.samples_per_s, *(throughput_interval(cell) or ()))
    if quantity == "memory" and cell.peak_bytes:
        return _Figure(cell.peak_bytes)
    if quantity == "mfu" and cell.mfu:
        if not (cell.seconds and cell.low_seconds and cell.high_seconds):
            return _Figure(cell.mfu)
        # FLOPs and peak are constants, so MFU varies as the step time does.
        return _Figure(
            cell.mfu, cell.mfu * cell.seconds / cell.high_seconds, cell.mfu * cell.seconds / cell.low_seconds
        )
    return None


def _ratio(a: _Figure, b: _Figure, quantity: Quantity) -> Ratio | None:
    ratio = b.value / a.value
    if not 0 < ratio <= MOST_FINITE:
        return None
    low = b.low / a.high if b.low and a.high else None
    high = b.high / a.low if b.high and a.low else None
    return Ratio(a.value, b.value, ratio, low, high, _verdict(a, b, quantity))


def _verdict(a: _Figure, b: _Figure, quantity: Quantity) -> Verdict:
    if quantity == "memory":
        is_decided = max(a.value, b.value) > (1 + MEMORY_RESOLUTION) * min(a.value, b.value)
    elif a.low is None or a.high is None or b.low is None or b.high is None:
        return "too few steps"
    else:
        is_decided = _ends_before(a.high, b.low) or _ends_before(b.high, a.low)
    if not is_decided:
        return "not told apart"
    return "better" if (b.value > a.value) == _MORE_IS_BETTER[quantity] else "worse"


def _ends_before(high: float, low: float) -> bool:
    return high * (1 + PROCESS_NOISE) < low * (1 - PROCESS_NOISE)
