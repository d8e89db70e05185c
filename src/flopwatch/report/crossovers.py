"""Where one trainer overtakes another along sequence length or batch size. Pure.

Between two measured neighbours the logarithm of the ratio is taken as linear in the logarithm of the axis: costs are
sums of powers of both, so this is straight where one power dominates.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from math import exp, log
from typing import NamedTuple

from flopwatch.report.records import Axis, Cell, Crossover, Quantity

PROCESS_NOISE = 0.02
"""Two processes that run the same differ by so much, even where the steps within each agree."""
MEMORY_RESOLUTION = 0.01
"""Peaks have no interval; closer than this they count as equal."""


class _Point(NamedTuple):
    value: int
    log_ratio: float  # of the first trainer over the second: below 0 the first is better
    is_decided: bool


def find_crossovers(cells: Iterable[Cell], trainers: Sequence[str]) -> tuple[Crossover, ...]:
    """All of a group, the claimed ones first."""
    ran = [cell for cell in cells if cell.outcome == "ok"]
    found: list[Crossover] = []
    for axis in ("sequence", "batch"):
        for fixed, line in _lines(ran, axis).items():
            for first, second in combinations(trainers, 2):
                if first in line and second in line:
                    for quantity in ("time", "memory"):
                        points = _points(line[first], line[second], quantity)
                        found += _along(points, first, second, quantity, axis, fixed)
    return tuple(sorted(found, key=lambda crossover: not crossover.is_claimed))


def is_told_apart(first: Cell, second: Cell, quantity: Quantity) -> bool:
    """Whether the measurement decides: intervals 2 % wider on each side do not overlap, peaks differ by 1 %."""
    if quantity == "memory":
        peaks = first.peak_bytes or 0, second.peak_bytes or 0
        return max(peaks) > (1 + MEMORY_RESOLUTION) * min(peaks)
    return _ends_before(first, second) or _ends_before(second, first)


def _ends_before(first: Cell, second: Cell) -> bool:
    if first.high_seconds is None or second.low_seconds is None:
        return False
    return first.high_seconds * (1 + PROCESS_NOISE) < second.low_seconds * (1 - PROCESS_NOISE)


def interpolated(low: _Point, high: _Point) -> float:
    """Where the log ratio is 0 on the straight line through both."""
    share = low.log_ratio / (low.log_ratio - high.log_ratio)
    return exp(log(low.value) + share * (log(high.value) - log(low.value)))


def _lines(cells: Sequence[Cell], axis: Axis) -> dict[int, dict[str, dict[int, Cell]]]:
    """Fixed value, then trainer, then value along the axis."""
    lines: dict[int, dict[str, dict[int, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for cell in cells:
        along, fixed = (cell.seq_len, cell.batch_size) if axis == "sequence" else (cell.batch_size, cell.seq_len)
        lines[fixed][cell.trainer][along] = cell
    return dict(sorted(lines.items()))


def _points(first: dict[int, Cell], second: dict[int, Cell], quantity: Quantity) -> list[_Point]:
    points = []
    for value in sorted(first.keys() & second.keys()):
        a, b = first[value], second[value]
        amounts = (a.seconds, b.seconds) if quantity == "time" else (a.peak_bytes, b.peak_bytes)
        if amounts[0] and amounts[1]:
            points.append(_Point(value, log(amounts[0] / amounts[1]), is_told_apart(a, b, quantity)))
    return points


def _along(
    points: Sequence[_Point], first: str, second: str, quantity: Quantity, axis: Axis, fixed: int
) -> Iterator[Crossover]:
    decided = [place for place, point in enumerate(points) if point.is_decided]
    covered: set[int] = set()
    for low, high in pairwise(decided):
        if _crosses(points[low], points[high]):
            between = tuple(point.value for point in points[low + 1 : high])
            covered.update(range(low, high))
            at = None if between else interpolated(points[low], points[high])
            yield _crossover(points[low], points[high], (first, second), (quantity, axis, fixed), at, between)
    for place, (below, above) in enumerate(pairwise(points)):
        if place not in covered and _crosses(below, above):
            names = (first, second), (quantity, axis, fixed)
            yield _crossover(below, above, *names, None, (), is_claimed=False)


def _crosses(low: _Point, high: _Point) -> bool:
    return (low.log_ratio < 0 < high.log_ratio) or (high.log_ratio < 0 < low.log_ratio)


def _crossover(
    low: _Point,
    high: _Point,
    names: tuple[str, str],
    where: tuple[Quantity, Axis, int],
    at: float | None,
    equal_at: tuple[int, ...],
    *,
    is_claimed: bool = True,
) -> Crossover:
    below, above = names if low.log_ratio < 0 else names[::-1]
    return Crossover(*where, below, above, low.value, high.value, at, equal_at, is_claimed)
