"""Percentiles and bootstrap intervals. Standard library only.

Percentiles are interpolated linearly between the two nearest values, which is numpy's default. The 50th percentile is
then the usual median.

The bootstrap (Efron 1979) draws units with replacement and computes a statistic for every draw; the interval contains
the middle 95 % or 99 % of these values (percentile interval). In a sweep, units are single steps, because a trial
repeats the same batch and its steps are independent. In `flopwatch compare`, units are blocks of consecutive steps,
because the times of neighbouring steps of a training are correlated: single steps would turn one slow minute into
hundreds of independent slow steps (Carlstein 1986, Annals of Statistics 14, 1171; Kuensch 1989, Annals of Statistics
17, 1217). Ten blocks are enough for any length of run (Schmeiser 1982, Operations Research 30, 556). With so few blocks
the interval is too narrow (Hesterberg 2015, American Statistician 69, 371), so `flopwatch compare` uses 99 %. In
simulations of equal runs, it then reported a difference in 2 to 6 % of the pairs if the correlation of neighbouring
steps was at most 0.9, and in 23 % at a correlation of 0.98 in 400 steps.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from flopwatch.language import Said

MOST_BLOCKS = 10
FEWEST_BLOCKS = 5
FEWEST_STEPS_PER_BLOCK = 5
FEWEST_STEPS = FEWEST_BLOCKS * FEWEST_STEPS_PER_BLOCK

NO_DIFFERENCE = Said("no measurable difference")
TOO_FEW = Said("too few steps")

T = TypeVar("T")


class Thinned(Generic[T]):
    """A list of bounded length: when it is full, each pair of neighbours is merged into one.

    >>> pairs = Thinned(most=4, merge=lambda items: sum(items) / len(items))
    >>> for number in range(6):
    ...     pairs.add(number)
    >>> pairs.items()
    [0.5, 2.5, 4.5]
    """

    def __init__(self, most: int, merge: Callable[[list[T]], T]) -> None:
        self._most, self._merge = most, merge
        self._size = 1
        self._items: list[T] = []
        self._waiting: list[T] = []

    def __bool__(self) -> bool:
        return bool(self._items or self._waiting)

    def add(self, item: T) -> None:
        self._waiting.append(item)
        if len(self._waiting) == self._size:
            self._items.append(self._merge(self._waiting))
            self._waiting = []
            if len(self._items) >= self._most:
                self._items = in_groups(self._items, 2, self._merge)
                self._size *= 2

    def keep(self, is_kept: Callable[[T], bool]) -> None:
        self._items, self._waiting = list(filter(is_kept, self._items)), list(filter(is_kept, self._waiting))

    def items(self, most: int | None = None) -> list[T]:
        """The items, the last of which may be merged from fewer; if there are more than `most`, merged again."""
        items = [*self._items, *([self._merge(self._waiting)] if self._waiting else [])]
        while most is not None and len(items) > most:
            items = in_groups(items, 2, self._merge)
        return items


def in_groups(items: Sequence[T], size: int, merge: Callable[[list[T]], T]) -> list[T]:
    return [merge(list(items[start : start + size])) for start in range(0, len(items), size)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of sorted values, for a `share` from 0 to 1.

    >>> percentile([1.0, 2.0, 3.0], 0.25), percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    (1.5, 2.5)
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(ordered: Sequence[float]) -> float:
    """The median of sorted values. The standard library's `statistics` is not used, because its import takes 7 ms."""
    return percentile(ordered, 0.5)


def resampled(units: Sequence[T], draws: int, seed: int = 0) -> Iterator[list[T]]:
    """Bootstrap samples: `draws` lists of `len(units)` units, drawn with replacement. The seed determines them."""
    chance = random.Random(seed)
    return (chance.choices(units, k=len(units)) for _ in range(draws))


def interval(values: Iterable[float], confidence: float) -> tuple[float, float]:
    """The bounds of the middle part of the values; `confidence` is the share of the values between them.

    >>> interval(range(1001), 0.5)
    (250.0, 750.0)
    """
    ordered, outside = sorted(values), (1 - confidence) / 2
    return percentile(ordered, outside), percentile(ordered, 1 - outside)


_STUDENT = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)
"""The 97.5 % quantiles of Student's distribution with 1 to 9 degrees of freedom; the last serves for more, too."""


def interval_of_runs(medians: Sequence[float]) -> tuple[float, float]:
    """The ends of the 95 % interval of the median step time over several runs of one trial; needs two runs.

    It is Student's interval of the logarithms of the runs' medians: exp(mean ± t s / sqrt(n)). It includes the
    difference between two processes that run the same trial, which the steps of one process cannot show.

    >>> interval_of_runs([2.0, 2.0, 2.0])
    (2.0, 2.0)
    """
    logs = [math.log(median) for median in medians]
    mean = sum(logs) / len(logs)
    variance = sum((one - mean) ** 2 for one in logs) / (len(logs) - 1)
    half = _STUDENT[min(len(logs) - 1, len(_STUDENT)) - 1] * math.sqrt(variance / len(logs))
    return math.exp(mean - half), math.exp(mean + half)


def differ(change: tuple[float, float] | None, noise: tuple[float, float], less: str, more: str) -> str:
    """Whether B is less or more than A: one of these two words, `NO_DIFFERENCE`, or `TOO_FEW` without an interval.

    Args:
        change: The interval of the change from A to B, as a ratio or as a difference.
        noise: Changes that mean nothing, because they are seen between equal runs. The whole interval must lie
            beyond them, so that no difference is named that is not there.
        less: The word for an interval below the noise.
        more: The word for an interval above it.

    >>> differ((1.05, 1.3), (0.96, 1.04), "faster", "slower"), differ((1.01, 1.3), (0.96, 1.04), "faster", "slower")
    ('slower', 'no measurable difference')
    """
    if change is None:
        return TOO_FEW
    return more if change[0] > noise[1] else less if change[1] < noise[0] else NO_DIFFERENCE


def cut(steps: Sequence[T]) -> list[Sequence[T]]:
    """Divide steps into blocks of consecutive steps of about equal length; empty if there are too few steps.

    >>> [len(block) for block in cut(range(52))]
    [5, 5, 5, 5, 6, 5, 5, 5, 5, 6]
    """
    if len(steps) < FEWEST_STEPS:
        return []
    count = min(MOST_BLOCKS, len(steps) // FEWEST_STEPS_PER_BLOCK)
    edges = [index * len(steps) // count for index in range(count + 1)]
    return [steps[edges[index] : edges[index + 1]] for index in range(count)]
