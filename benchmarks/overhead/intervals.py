"""Ratios of interleaved timings, with their uncertainty. Pure arithmetic."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DRAWS = 2_000
CONFIDENCE = 0.95

Block = list[float]
"""Seconds of each step of one repeat."""
Pair = tuple[Block, Block]
"""One repeat: the steps without, and those with, run in turns."""
Statistic = Callable[[Sequence[Pair]], float]


@dataclass(frozen=True)
class Interval:
    """A value and the 95 % bootstrap interval around it."""

    value: float
    low: float
    high: float

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


def ratio_of_medians(pairs: Sequence[Pair]) -> float:
    """Of the step times; deaf to what happens on few steps only."""
    bare = [seconds for without, _ in pairs for seconds in without]
    watched = [seconds for _, watched in pairs for seconds in watched]
    return statistics.median(watched) / statistics.median(bare)


def ratio_of_blocks(pairs: Sequence[Pair]) -> float:
    """The median over the repeats of all seconds with over all seconds without: rare expensive steps count in full."""
    return statistics.median(sum(watched) / sum(without) for without, watched in pairs)


def bootstrap(statistic: Statistic, pairs: Sequence[Pair], seed: int = 0) -> Interval:
    """Draw repeats with replacement, each with both its halves: they share the machine's mood."""
    draw = random.Random(seed)
    values = [statistic(draw.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]
    low, high = percentile(values, (1 - CONFIDENCE) / 2), percentile(values, (1 + CONFIDENCE) / 2)
    return Interval(statistic(pairs), low, high)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, between neighbours by straight line.

    >>> percentile([1.0, 2.0, 3.0], 0.75)
    2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
