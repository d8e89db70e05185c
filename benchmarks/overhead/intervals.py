"""Ratios of interleaved timings, with their uncertainty. Pure arithmetic."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flopwatch.stats import interval, resampled

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
    low, high = interval((statistic(draw) for draw in resampled(pairs, DRAWS, seed)), CONFIDENCE)
    return Interval(statistic(pairs), low, high)
