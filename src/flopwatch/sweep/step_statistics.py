"""Statistics of step times. Pure, and without numpy: supervisors use it."""

import random
from collections.abc import Sequence

from flopwatch.trial_records import StepTimes

_RESAMPLES = 500
_UNSTABLE_WIDTH = 0.05


def step_times(seconds: Sequence[float], first: float | None = None) -> StepTimes | None:
    """Median, percentiles and the median's 95 % bootstrap interval (Efron 1979, percentile method).

    >>> step_times([2.0, 1.0, 3.0]).median
    2.0
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    middle = median(ordered)
    low, high = _interval_of_median(ordered)
    return StepTimes(
        count=len(ordered),
        median=middle,
        low=low,
        high=high,
        p10=percentile(ordered, 0.10),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        first=seconds[0] if first is None else first,
        unstable=len(ordered) < 3 or high - low > _UNSTABLE_WIDTH * middle,
    )


def median(ordered: Sequence[float]) -> float:
    """Of sorted values. The standard library's costs a supervisor 7 ms to import."""
    return percentile(ordered, 0.5)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest, as numpy's default.

    >>> percentile([1.0, 2.0, 3.0], 0.25)
    1.5
    """
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    draw = random.Random(0)  # the same steps always give the same interval
    medians = sorted(median(sorted(draw.choices(ordered, k=len(ordered)))) for _ in range(_RESAMPLES))
    return percentile(medians, 0.025), percentile(medians, 0.975)
