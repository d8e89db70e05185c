"""How values spread: percentiles, and bootstrap intervals. Standard library only, and quick to import.

There is one definition of a percentile: linear between the two nearest values, as numpy's default and Excel's
PERCENTILE.INC. It was chosen because its 50th percentile is the median as everyone computes it; the nearest-rank
definition gives the lower of the two middle values of an even number of steps.

There is one bootstrap (Efron 1979): units are drawn with replacement, a statistic is computed for every draw, and the
interval is what the middle of these values lie between (the percentile interval). Units are single steps where steps
are independent: the trials of a sweep, which run the same batch again and again. They are blocks of consecutive steps
where neighbouring steps resemble each other: the runs that `flopwatch compare` reads.

Blocks (Carlstein 1986, Annals of Statistics 14, 1171; Kuensch 1989, Annals of Statistics 17, 1217): drawing single
steps would call a slow minute hundreds of independent slow steps. Ten blocks are enough for any length of run
(Schmeiser 1982, Operations Research 30, 556), and so few blocks are long, hence nearly independent of each other.
With so few blocks the interval is too narrow (Hesterberg 2015, American Statistician 69, 371), so `flopwatch compare`
takes 99 %: of simulated pairs of equal runs, 2 to 6 % were called different by mistake while neighbouring steps were
correlated by 0.9 or less. It was 23 % at 0.98 in 400 steps: within a run, a drift as long as the run cannot be
distinguished from a difference.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

MOST_BLOCKS = 10
FEWEST_BLOCKS = 5
FEWEST_STEPS_PER_BLOCK = 5
FEWEST_STEPS = FEWEST_BLOCKS * FEWEST_STEPS_PER_BLOCK

T = TypeVar("T")


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of the sorted values lies, linear between the two nearest.

    >>> percentile([1.0, 2.0, 3.0], 0.25), percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    (1.5, 2.5)
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(ordered: Sequence[float]) -> float:
    """The median of sorted values. Importing the standard library's `statistics` would cost a supervisor 7 ms."""
    return percentile(ordered, 0.5)


def resampled(units: Sequence[T], draws: int, seed: int = 0) -> Iterator[list[T]]:
    """As many units as there are, drawn with replacement, `draws` times. The same seed gives the same draws."""
    chance = random.Random(seed)
    return (chance.choices(units, k=len(units)) for _ in range(draws))


def interval(values: Iterable[float], confidence: float) -> tuple[float, float]:
    """What the middle of the values lie between.

    >>> interval(range(1001), 0.5)
    (250.0, 750.0)
    """
    ordered, outside = sorted(values), (1 - confidence) / 2
    return percentile(ordered, outside), percentile(ordered, 1 - outside)


def cut(steps: Sequence[T]) -> list[Sequence[T]]:
    """Blocks of consecutive steps whose lengths differ by one at most; none where there are too few steps.

    >>> [len(block) for block in cut(range(52))]
    [5, 5, 5, 5, 6, 5, 5, 5, 5, 6]
    """
    if len(steps) < FEWEST_STEPS:
        return []
    count = min(MOST_BLOCKS, len(steps) // FEWEST_STEPS_PER_BLOCK)
    edges = [index * len(steps) // count for index in range(count + 1)]
    return [steps[edges[index] : edges[index + 1]] for index in range(count)]
