"""B over A for one pair of trials, with what the intervals allow and whether they decide. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flopwatch.report.cells import MOST_FINITE
from flopwatch.report.choices import throughput_interval
from flopwatch.report.crossovers import MEMORY_RESOLUTION, PROCESS_NOISE
from flopwatch.report.records import Cell
from flopwatch.sweep_comparison.records import Overall, Pair, Quantity, Ratio, Verdict

QUANTITIES: tuple[Quantity, ...] = ("time", "samples_per_s", "memory", "mfu")
_MORE_IS_BETTER: Mapping[Quantity, bool] = {"time": False, "samples_per_s": True, "memory": False, "mfu": True}


class _Figure(NamedTuple):
    value: float
    low: float | None = None
    high: float | None = None


def ratios(a: Cell, b: Cell) -> dict[Quantity, Ratio]:
    """Of two `ok` trials; what either does not know is left out."""
    found: dict[Quantity, Ratio] = {}
    for quantity in QUANTITIES:
        one, other = _figure(a, quantity), _figure(b, quantity)
        if one is None or other is None:
            continue
        if quantity == "mfu" and (a.is_lower_bound or b.is_lower_bound):
            continue  # the ratio of two bounds bounds nothing
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
        # FLOPs and peak have no spread: MFU varies as the time does.
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
