"""Which batch to try next, to find the largest that fits and the fastest in few trials. Pure arithmetic.

Memory is nearly affine in the batch, so two small trials predict the edge; the prediction is then verified by real
trials on both sides of it. Where memory is not affine, the bracket between what fitted and what did not is narrowed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flopwatch.records.trial import Outcome

# Curves through peaks of memory over the batch, and the largest batch at which each stays within a capacity.


Point: TypeAlias = tuple[int, int]
"""Batch size and bytes; points are sorted by batch size."""


def edge_of_line(points: Sequence[Point], capacity: int) -> int | None:
    """The largest batch within the capacity on a straight line through the points; None if the line does not rise.

    Least squares, weighted by the squared batch size, because the large batches are nearest to the edge.

    >>> edge_of_line([(1, 310), (8, 380)], 1000)
    70
    """
    if len(points) < 2:
        return None
    total = sum(size**2 for size, _ in points)
    mean_size = sum(size**3 for size, _ in points) / total
    mean_peak = sum(size**2 * peak for size, peak in points) / total
    spread = sum(size**2 * (size - mean_size) ** 2 for size, _ in points)
    slope = sum(size**2 * (size - mean_size) * (peak - mean_peak) for size, peak in points) / spread
    if slope <= 0:
        return None
    return max(0, math.floor(mean_size + (capacity - mean_peak) / slope + 1e-9))


def edge_of_parabola(points: Sequence[Point], capacity: int) -> int | None:
    """The same on the parabola through the three largest batches; None unless it bends upwards.

    >>> edge_of_parabola([(size, 100 + 3 * size + size**2) for size in (1, 8, 20)], 100 + 3 * 50 + 50**2)
    50
    """
    if len(points) < 3:
        return None
    (x0, y0), (x1, y1), (x2, y2) = points[-3:]
    slope01, slope12 = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (slope12 - slope01) / (x2 - x0)
    if bend <= 0:
        return None
    # Solve y2 + slope (x - x2) + bend (x - x2)^2 = capacity for x, and take the root above x2
    slope = slope12 + bend * (x2 - x1)
    root = slope**2 + 4 * bend * (capacity - y2)
    return math.floor(x2 + (math.sqrt(root) - slope) / (2 * bend) + 1e-9) if root >= 0 else None


TOLERANCE = 0.05
"""The search for the largest batch ends when none that is larger by more than this share could fit."""

MOST_BATCH = 4096
"""The default for the largest batch to try."""

_FIRST_BATCHES = (1, 8)
_MOST_GROWTH = 16
"""The next batch is at most this many times the largest one tried: a line through small batches does not reach far."""

_NEAR_MISS = 1.1
"""A predicted edge up to this far above a batch that did not fit is still believed: some capacity is unusable."""

_PATIENCE = 8
"""After so many trials the curves are not followed any more, and the bracket is halved instead."""

_LEAST_NOISE = 0.02
"""The throughput of two processes differs by this share even if the steps within each process agree."""

_SPEED_PROBES = 2
_WORTHWHILE_GAP = 2.5
"""For the fastest batch, only gaps between two tried batches with a larger ratio are narrowed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one batch size.

    Attributes:
        batch_size: Samples per step.
        fits: None if the trial failed for another reason than memory.
        outcome: The outcome of the trial.
        reason: The reason for that outcome.
        peak_bytes: Peak memory; None if unknown.
        capacity_bytes: The memory it could use; None if unknown.
        samples_per_s: From the median step.
        slowest_per_s: From the high end of the step's interval.
        fastest_per_s: From the low end of the step's interval.
        step_seconds: The median.
        is_bare: It fitted only after the allocator had released memory and tried again.
    """

    batch_size: int
    fits: bool | None
    outcome: Outcome
    reason: str = ""
    peak_bytes: int | None = None
    capacity_bytes: int | None = None
    samples_per_s: float | None = None
    slowest_per_s: float | None = None
    fastest_per_s: float | None = None
    step_seconds: float | None = None
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    Attributes:
        largest: The largest batch that fitted; None if not even 1 did.
        too_large: The smallest batch that did not fit; None if all did.
        is_largest_known: Whether these two are close enough, or every batch up to the largest allowed one fits.
        fastest: The smallest batch whose throughput is not measurably below the best; None without times.
        as_fast: The next larger batch that was tried, if it is not measurably faster; otherwise None.
        probes: All batches tried, in order.
        probes_for_largest: How many of them it took to find the largest.
        stopped: Why the search ended early; otherwise empty.
    """

    largest: int | None
    too_large: int | None
    is_largest_known: bool
    fastest: int | None
    as_fast: int | None
    probes: tuple[Probe, ...]
    probes_for_largest: int
    stopped: str = ""


def search(
    measure: Callable[[int], Probe],
    max_batch: int = MOST_BATCH,
    tolerance: float = TOLERANCE,
    speed_probes: int = _SPEED_PROBES,
) -> Found:
    """Find the largest batch that fits, then the fastest.

    Args:
        measure: Tries one batch size.
        max_batch: The largest batch to try.
        tolerance: By what share the true largest batch may exceed the answer.
        speed_probes: How many more batches may be tried to find the fastest.

    >>> def measure(batch_size):
    ...     used = 300 + 10 * batch_size
    ...     return Probe(batch_size, used <= 1000, "ok" if used <= 1000 else "oom_host", "", used, 1000)
    >>> found = search(measure)
    >>> found.largest, found.too_large, len(found.probes)
    (70, 71, 4)
    """
    probes: list[Probe] = []
    for_speed = 0
    while not _why_stopped(probes):
        batch_size = next_for_largest(probes, max_batch, tolerance)
        if batch_size is None and for_speed < speed_probes:
            batch_size = next_for_fastest(probes)
            for_speed += batch_size is not None
        if batch_size is None:
            break
        probes.append(measure(batch_size))
    return _found(probes, for_speed, is_largest_known=next_for_largest(probes, max_batch, tolerance) is None)


def _found(probes: Sequence[Probe], for_speed: int, *, is_largest_known: bool) -> Found:
    fitting = _fitting(probes)
    fastest, as_fast = fastest_of(probes)
    return Found(
        largest=fitting[-1].batch_size if fitting else None,
        too_large=_too_large(probes),
        is_largest_known=is_largest_known,
        fastest=fastest,
        as_fast=as_fast,
        probes=tuple(probes),
        probes_for_largest=len(probes) - for_speed,
        stopped=_why_stopped(probes),
    )


def _why_stopped(probes: Sequence[Probe]) -> str:
    if not probes or probes[-1].fits is not None:
        return ""
    last = probes[-1]
    return f"batch {last.batch_size}: {last.outcome}: {last.reason}".rstrip(": ")


def _too_large(probes: Sequence[Probe]) -> int | None:
    return min((probe.batch_size for probe in probes if probe.fits is False), default=None)


def _fitting(probes: Sequence[Probe]) -> list[Probe]:
    """Batches that fitted, by size. Those above a batch that did not fit are left out as chance results."""
    edge = _too_large(probes)
    fitting = [probe for probe in probes if probe.fits and (edge is None or probe.batch_size < edge)]
    return sorted(fitting, key=lambda probe: probe.batch_size)


def next_for_largest(probes: Sequence[Probe], max_batch: int, tolerance: float = TOLERANCE) -> int | None:
    """The batch to try next; None if the largest is known well enough."""
    fitting = _fitting(probes)
    low = fitting[-1].batch_size if fitting else 0
    too_large = _too_large(probes)
    high = max_batch + 1 if too_large is None else too_large
    if high - low <= 1 or (too_large is not None and low >= (1 - tolerance) * (high - 1)):
        return None
    guess = _first_batch(low, high) or _guess(probes, fitting, too_large, tolerance)
    return max(low + 1, min(guess, high - 1))


def _first_batch(low: int, high: int) -> int | None:
    """Two small batches for the first line. A third between them saved no trial on any curve of the benchmark."""
    return next((size for size in _FIRST_BATCHES if low < size < high), None)


def _guess(probes: Sequence[Probe], fitting: Sequence[Probe], too_large: int | None, tolerance: float) -> int:
    low, is_patient = fitting[-1].batch_size, len(probes) <= _PATIENCE
    if too_large is None:
        return _guess_above(fitting, tolerance) if is_patient else 2 * low
    if not is_patient:
        return _middle(low, too_large)
    return _guess_between(fitting, too_large, _misses_since_a_fit(probes), tolerance)


def _guess_above(fitting: Sequence[Probe], tolerance: float) -> int:
    low, edge = fitting[-1].batch_size, _edge(edge_of_line, fitting)
    just_closing = _just_closing(low, tolerance)
    if edge is None:
        return 4 * low
    if edge >= just_closing:
        return min(edge, _MOST_GROWTH * low)
    # The line predicts no more than this. Trust it less each time that a larger batch fits after all.
    surprises = sum(probe.batch_size >= 0.9 * low for probe in fitting) - 1
    return (min(edge + 1, just_closing), just_closing, 2 * low)[min(surprises, 2)]


def _just_closing(low: int, tolerance: float) -> int:
    """The smallest batch that would end the search if it did not fit."""
    return math.floor(low / (1 - tolerance)) + 1


def _guess_between(fitting: Sequence[Probe], too_large: int, misses: int, tolerance: float) -> int:
    """Follow the line first, after two misses the parabola, and after three halve the bracket.

    A curve is followed if it ends inside the bracket. If it ends slightly above, part of the capacity is unusable, and
    the batch that would end the search is tried.
    """
    low = fitting[-1].batch_size
    nearly = math.ceil((1 - tolerance) * (too_large - 1))  # the search is over if this one fits
    if low >= (1 - tolerance) * (nearly - 1):
        return nearly  # the search is over whether it fits or not
    curves = {2: (edge_of_parabola, edge_of_line)}.get(misses, (edge_of_line, edge_of_parabola))
    for edge in (_edge(curve, fitting) for curve in curves if misses <= 2):
        if edge is not None and edge < nearly:
            return max(edge, min(edge + 1, _just_closing(low, tolerance)))
        if edge is not None and edge <= _NEAR_MISS * too_large:
            return nearly
    return _middle(low, too_large)


def _misses_since_a_fit(probes: Sequence[Probe]) -> int:
    since = 0
    for probe in reversed(probes):
        if probe.fits:
            break
        since += 1
    return since


def _middle(low: int, high: int) -> int:
    """The geometric mean while they are far apart, because the tolerance is relative; otherwise the middle."""
    return round(math.sqrt(low * high)) if high > 4 * low > 0 else (low + high) // 2


def _edge(curve: Callable[[Sequence[Point], int], int | None], fitting: Sequence[Probe]) -> int | None:
    """The batch at which this curve through the peaks reaches the capacity; None if that is unknown."""
    points = [(probe.batch_size, probe.peak_bytes) for probe in fitting if probe.peak_bytes is not None]
    capacity = next((probe.capacity_bytes for probe in reversed(fitting) if probe.capacity_bytes is not None), None)
    return None if capacity is None else curve(points, capacity)


def fastest_of(probes: Sequence[Probe]) -> tuple[int | None, int | None]:
    """The smallest batch that is not measurably slower than the best, and the next larger one if it is as fast."""
    timed = [probe for probe in _fitting(probes) if probe.samples_per_s]
    if not timed:
        return None, None
    surely = max(_reach(probe)[0] for probe in timed)
    place = next(index for index, probe in enumerate(timed) if _reach(probe)[1] >= surely)
    larger = timed[place + 1] if place + 1 < len(timed) else None
    is_as_fast = larger is not None and _reach(larger)[1] >= _reach(timed[place])[0]
    return timed[place].batch_size, larger.batch_size if larger is not None and is_as_fast else None


def _reach(probe: Probe) -> tuple[float, float]:
    """The interval of the true throughput."""
    rate = probe.samples_per_s or 0.0
    low, high = probe.slowest_per_s or rate, probe.fastest_per_s or rate
    return min(low, (1 - _LEAST_NOISE) * rate), max(high, (1 + _LEAST_NOISE) * rate)


def next_for_fastest(probes: Sequence[Probe]) -> int | None:
    """The middle of the gap below the fastest so far, or above it if that is much wider; None if both are narrow."""
    fastest, _ = fastest_of(probes)
    if fastest is None:
        return None
    sizes = [probe.batch_size for probe in _fitting(probes)]
    place = sizes.index(fastest)
    below, above = (sizes[max(0, place - 1)], fastest), (fastest, sizes[min(place + 1, len(sizes) - 1)])
    low, high = above if above[1] / above[0] > 2 * below[1] / below[0] else below
    return round(math.sqrt(low * high)) if high / low > _WORTHWHILE_GAP else None
