"""The curve of a metric over a run, with a bounded number of points that keep the extremes of what they stand for."""

from dataclasses import dataclass
from math import isfinite

from flopwatch.stats import Thinned

MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class Point:
    """The values of a metric in one or several logging windows.

    Attributes:
        first_step: The first step of the windows.
        last_step: The last step of the windows.
        unix_time: When the last window ended.
        low: The least value of a step, or of a window if the log has no value for each step.
        mean: The mean, weighted by the time of the windows for a rate or share, or else by their steps.
        high: The largest value of a step or window.
        weight: What the mean is weighted by, in seconds or steps.
    """

    first_step: int
    last_step: int
    unix_time: float
    low: float
    mean: float
    high: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over the run, oldest point first.

    Attributes:
        key: Its key in the log, such as `perf/mfu_percent`.
        windows: Number of logging windows that have a value.
        last: The value of the newest window.
        mean: The weighted mean of all windows (see `Point.mean`).
        broken_windows: Number of windows whose value is nan or infinite. They are in no point.
        broken_at_step: The first step at which the value is nan or infinite.
    """

    key: str
    points: tuple[Point, ...]
    windows: int
    last: float | None
    mean: float | None
    broken_windows: int = 0
    broken_at_step: int | None = None


class CurveMaker:
    """Collects the points of a curve, newest first, in bounded memory.

    >>> maker = CurveMaker("perf/step_time", most_points=2)
    >>> for step in (4, 3, 2, 1):
    ...     maker.add(Point(step, step, 100.0 + step, step, step, step))
    >>> [(point.first_step, point.last_step, point.low, point.mean) for point in maker.curve().points]
    [(1, 2, 1, 1.5), (3, 4, 3, 3.5)]
    """

    def __init__(self, key: str, most_points: int = MOST_POINTS) -> None:
        self.key = key
        self._most_points = most_points
        self._points = Thinned(2 * most_points, merged)
        self._windows = 0
        self._last: float | None = None
        self._broken_windows = 0
        self._broken_at_step: int | None = None

    def add(self, point: Point) -> None:
        """Add the point of a window that is older than those before."""
        if not (isfinite(point.low) and isfinite(point.mean) and isfinite(point.high)):
            self._broken_windows += 1
            self._broken_at_step = point.first_step
            return
        self._windows += 1
        self._last = point.mean if self._last is None else self._last
        self._points.add(point)

    def curve(self) -> Curve:
        points = self._points.items(self._most_points)
        mean = merged(points).mean if points else None
        broken = (self._broken_windows, self._broken_at_step)
        return Curve(self.key, tuple(reversed(points)), self._windows, self._last, mean, *broken)


def merged(points: list[Point]) -> Point:
    """One point that stands for several, in any order."""
    if len(points) == 1:
        return points[0]
    weight = sum(point.weight for point in points)
    # Without any weight all windows count alike.
    weights = [point.weight if weight else 1.0 for point in points]
    mean = sum(point.mean * share for point, share in zip(points, weights, strict=True)) / sum(weights)
    return Point(
        min(point.first_step for point in points),
        max(point.last_step for point in points),
        max(point.unix_time for point in points),
        min(point.low for point in points),
        mean,
        max(point.high for point in points),
        weight,
    )
